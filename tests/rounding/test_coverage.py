"""Which algorithms a rule of rounding covers: every rule says it, and the page of it is the registry's."""

from certcli.rounding.arithmetics import ALGORITHMS, covered
from certcli.rounding.operation_errors import rules
from tests.rounding.coverage import documents


def test_every_rule_states_what_it_covers() -> None:
    stated = {title: covered(rule.apply) for title, rule in rules.modules.items()}
    for table in (rules.functions, rules.methods, rules.settlers):
        stated |= {title: covered(rule) for title, rule in table.items()}
    assert [title for title, names in stated.items() if not names] == []
    assert {name for names in stated.values() for name in names} == {*ALGORITHMS}


def test_the_page_is_that_of_the_registry() -> None:
    written = {path: path.read_text() for path in documents()}
    assert written == documents(), "python -m tests.rounding.coverage"
