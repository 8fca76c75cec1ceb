"""A restaurant's booking assistant that talks with a simulated user: a further model that plays the guest."""

from rollout_server import Agent, Limits, Run, ToolError, tool

GUEST = """You call a restaurant to book a table. What you want: {wish}. Answer what you are asked, one fact at a time.
When the table is booked, say GOODBYE."""


@tool
async def book(day: str, guests: int, run: Run) -> str:
    """Book a table.

    Args:
        day: day of the week.
        guests: number of guests.
    """
    if not 1 <= guests <= 8:
        raise ToolError("there are tables for 1 to 8 guests")
    run.state["booked"] = f"{guests} on {day}"
    return f"Booked for {guests} on {day}."


class Assistant(Agent):
    """Books a table. Only its own messages are trained; the guest's are appended with mask 0."""

    name = "assistant"
    tools = (book,)
    limits = Limits(turns=16, seconds=300)

    async def play(self, run: Run) -> None:
        """Let assistant and guest speak in turns until the guest says goodbye."""
        while True:
            while calls := (await run.sample()).tool_calls:
                await run.call(calls)
            said = (await run.model("user").sample(self.as_guest(run), temperature=0.7)).content
            await run.append({"role": "user", "content": said})
            if "GOODBYE" in said:
                return

    def as_guest(self, run: Run) -> list[dict[str, object]]:
        """Return the conversation as the guest sees it: what the assistant says is said to the guest."""
        talk = [
            message for message in run.messages if message["role"] in ("user", "assistant") and message.get("content")
        ]
        swapped = {"user": "assistant", "assistant": "user"}
        turns = [{"role": swapped[str(message["role"])], "content": message["content"]} for message in talk]
        return [{"role": "system", "content": GUEST.format(wish=run.metadata["wish"])}, *turns]

    async def reward(self, run: Run) -> float:
        """Return 1.0 if the table is the one that the guest wants, else 0.0."""
        return float(run.state.get("booked") == run.metadata["ground_truth"])
