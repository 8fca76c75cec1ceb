"""The rules of the toy tokenizer, found once."""

import pytest
from rollout_server.verification.token_rules import TokenRules

from tests.verification.rows import toy_rules


@pytest.fixture(scope="session")
def rules() -> TokenRules:
    """The rules of the toy tokenizer."""
    return toy_rules()
