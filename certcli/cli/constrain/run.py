"""The work of `certvit constrain`: to an error, or to an agreement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from certcli.cli.shared.output import Sink
    from certcli.constrain.network import LayerCalibration
    from certcli.constrain.settings import ConstrainSettings


@dataclass(frozen=True)
class Job:
    """One network whose layers are constrained in place."""

    calibration: LayerCalibration
    settings: ConstrainSettings
    sink: Sink

    def to_error(self) -> list[Any]:
        """Constrain each layer to the output error of the settings."""
        from certcli.constrain import network

        results = []
        with self.sink.progress("constrain", total=len(self.calibration.paths)) as bar:
            for result in network.constrain_to(self.calibration, self.settings):
                results.append(result)
                bar.advance(remark=result.path)
        network.write(self.calibration.model, {r.path: r.weight for r in results})
        return results

    def to_agreement(self, share: float, reference: Any) -> tuple[list[Any], Any]:
        """Search the largest error at which this share of top-1 predictions is preserved.

        Returns:
            The layers' results, empty where no error is small enough; the measured fidelity.
        """
        from certcli.constrain.keep import ROUNDS, TRIALS, constrain_keeping

        total = len(self.calibration.paths) * (TRIALS + ROUNDS)
        with self.sink.progress("constrain", total=total) as bar:
            outcome = constrain_keeping(
                self.calibration,
                self.settings,
                share,
                reference,
                lambda eta, path: bar.advance(remark=f"eta {eta:.3g}: {path}"),
            )
        if not outcome.results:
            message = f"no tried eta preserves {100 * share:g} % of the top-1 predictions"
            self.sink.warn(f"{message}: the network is unchanged")
        return list(outcome.results), outcome.fidelity
