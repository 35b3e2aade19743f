"""The theorems of the global domain: `rules.module`, `.function`, `.method` and `.settles` register
them.
"""

from certcli.engine.table import RuleTable

rules = RuleTable("lipschitz")
