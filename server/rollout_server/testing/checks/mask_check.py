"""What a `response_mask` has to be (http-wire.md, A): one 0 for each token that is new since the last answer."""


def mask_fault(mask: object, new_tokens: int) -> str | None:
    """What is wrong with the mask of a later turn, in words that name both lengths; None if it is right.

    With nothing new, null and ``[]`` are both right.
    """
    are_new = f"{new_tokens} tokens are new since the last answer"
    if mask is None:
        return f"response_mask is missing, {are_new}" if new_tokens else None
    if not isinstance(mask, list):
        return f"response_mask is no list, {are_new}"
    if len(mask) != new_tokens:
        return f"response_mask has length {len(mask)}, {are_new}"
    for index, value in enumerate(mask):
        if type(value) is not int or value != 0:
            return f"response_mask[{index}] is {value!r}, but the model generated none of the {new_tokens} new tokens"
    return None


def first_mask_fault(mask: object) -> str | None:
    """The same for the first turn, where nothing was generated yet: null, or ``[]``."""
    if mask is None or mask == []:
        return None
    length = f"has length {len(mask)}" if isinstance(mask, list) else "is no list"
    return f"response_mask {length}, but on the first turn it is null: 0 tokens are new"
