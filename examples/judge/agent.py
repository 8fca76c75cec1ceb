"""One-sentence summaries, rewarded by a rule and by a judge: a further model that reads source, reference and summary."""

from rollout_server import Agent, Judge, Limits, Rubric, number_from

PROMPT = """Rate how well the summary covers the reference.

Text: {question}
Reference: {answer}
Summary: {response}

End with a line "Score: N" with a whole number from 0 to 10."""


def one_sentence(response: str) -> float:
    """Return 1.0 for a response of one sentence, else 0.0."""
    return float(response.strip().endswith(".") and response.count(".") == 1)


class Summarizer(Agent):
    """Summarizes a text in one sentence."""

    name = "summarizer"
    limits = Limits(turns=1, seconds=300)
    rubric = Rubric(
        funcs=[one_sentence, Judge(model="judge", prompt=PROMPT, parser=number_from(0, 10), name="coverage")],
        weights=[0.5, 0.05],
    )
