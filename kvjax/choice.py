"""Options that have a few named values."""


def one_of(name: str, value: object, *choices: object) -> None:
    """Refuses what is none of `choices`.

    Args:
      name: the option, as its user writes it.
      value: what the user gave.
      *choices: the values that exist.

    Raises:
      ValueError: naming the option, the value and the choices.
    """
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not one of {choices}")
