"""Tests. `typechecked` is their run-time type checker: beartype, where an int is a float as PEP 484 says."""

from beartype import BeartypeConf, beartype

typechecked = beartype(conf=BeartypeConf(is_pep484_tower=True))
