"""The room above the rooms: checkpoint, images, time budget -> `certcli.report.document.Audit`.

It asks the rooms for a bound, a slope, certificates and attacks, one stage after the other, and
never goes over its budget without naming the stages that are missing. Like the rooms it returns
values; `cli/` and `api` show them.
"""
