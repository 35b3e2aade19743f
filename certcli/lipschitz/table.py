"""The global domain's theorems: `rules.module`, `.function`, `.method`, `.settles` add them."""

from certcli.engine.table import RuleTable

rules = RuleTable("lipschitz")
