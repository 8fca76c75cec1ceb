"""Remember how trainers render and count, and choose the form to try after a refused mask."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Final, TypeAlias

from rollout_server.core.spec import Spec
from rollout_server.edge.tokens.rendering_form import RenderingForm
from rollout_server.edge.trainer.http_client import HttpResponse

_KEPT: Final = 10_000
_LOOKED_AT: Final = 64 * 1024
_Key: TypeAlias = tuple[str, str, str]


class FormCache:
    """The known forms of trainers, by endpoint and tokenizer. When the cache is full, the form stored longest ago is dropped."""

    def __init__(self) -> None:
        self._known: OrderedDict[_Key, RenderingForm] = OrderedDict()

    def of(self, spec: Spec) -> RenderingForm | None:
        """Return the known form of the rollout's trainer; None if nothing is known."""
        return self._known.get(_key(spec))

    def remember(self, spec: Spec, form: RenderingForm) -> None:
        """Store the form for later rollouts."""
        key = _key(spec)
        self._known[key] = form
        self._known.move_to_end(key)
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)


def refuses_mask(response: HttpResponse) -> bool:
    """Return whether the response is a 422 that mentions a mask: the trainer refused the mask's length and generated nothing."""
    return response.status == 422 and b"mask" in response.body[:_LOOKED_AT].lower()


def likeliest_form(counts: Mapping[RenderingForm, int], response: HttpResponse) -> RenderingForm | None:
    """Return the form to try next; None if there is none.

    Prefer a form whose count appears in the trainer's error text; otherwise the most similar form.
    """
    named = {int(digits) for digits in re.findall(rb"(?<![\w.])\d{1,9}(?![\w.]*\d)", response.body[:_LOOKED_AT])}
    return next((form for form, length in counts.items() if length in named), next(iter(counts), None))


def _key(spec: Spec) -> _Key:
    name = spec.tokenizer
    return spec.completions.url, name.name if name is not None else "", name.revision if name is not None else ""
