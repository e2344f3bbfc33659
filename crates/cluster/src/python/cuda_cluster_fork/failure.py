"""Why a process cannot start, in words for a person."""


class StartFailure(Exception):
    """Its text is all that the user needs; no traceback is shown."""


def describe(error: BaseException | None) -> str:
    """The chain of causes in one line, the outermost first, without repetitions."""
    parts: list[str] = []
    while error is not None:
        text = str(error).strip().rstrip(".")
        name = type(error).__name__
        text = f"{name}: {text}" if text else name
        if not any(text in part for part in parts):
            parts.append(text)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "; caused by ".join(parts)
