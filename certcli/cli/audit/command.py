"""certvit audit: bound, slope, certificates and attacks within a time budget, in words."""

from certcli.cli.audit.options import AuditOptions, Reports
from certcli.cli.shared.command import command
from certcli.cli.shared.groups import BatchDevice, Evaluation, Output, Source, Talk


@command(
    "certvit audit m.safetensors --dataset digits --html audit.html",
    'certvit audit m.safetensors --limit 100 --fail-on "certified@0.25<0.4" --fail-on "robust@0.5<0.2"',
    page="audit.md",
    often=(
        "time_budget",
        "epsilon",
        "methods",
        "fail_on",
        "report",
        "html",
    ),
)
def audit(
    source: Source,
    options: AuditOptions = AuditOptions(),
    data: Evaluation = Evaluation(limit=200),
    machine: BatchDevice = BatchDevice(),
    reports: Reports = Reports(),
    output: Output = Output(),
    talk: Talk = Talk(),
) -> None:
    """Say in words how robust a network is: bound, slope, certificates and attacks within a time
    budget."""
    from certcli.cli.audit import run

    run.report_audit(source, options, data, machine, reports, output, talk)
