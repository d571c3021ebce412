"""The gate of this process, started on demand: what judges of folders and of clusters judge with."""

from __future__ import annotations

import traceback

from pytest_klineage.errors import HarnessError, UsageError
from pytest_klineage.executors.base import gate_settings
from pytest_klineage.executors.carried import DefinitionMissing, check_dependencies, import_error, supply
from pytest_klineage.gate.host.gpus import NoGpu
from pytest_klineage.gate.judge import Gate
from pytest_klineage.gate.settings import GateSettings
from pytest_klineage.records import Machine
from pytest_klineage.records.judging import FaultCode, JudgeReply, JudgeRequest, MachineFault, as_it_travels


class LocalExecutor:
    """Judges at once, on this machine. One gate is open at a time; other settings end it and start another."""

    def __init__(self, platform: str, local: GateSettings | None = None) -> None:
        self.platform = platform
        self._local = local or GateSettings()
        self._gate: Gate | None = None

    def judge(self, request: JudgeRequest) -> JudgeReply:
        """The reply to a request, made now. A kernel's failings are its verdict, ours are a MachineFault."""
        try:
            if request.platform != self.platform:
                raise UsageError(f"this judge has {self.platform}, the request asks for {request.platform}")
            supply(request, self._local.cache_dir)
            verdict = self._gate_for(request).judge(
                request.case, request.source, reference_source=request.reference_source, platforms=request.platforms,
                screen_against=request.screen_against,
            )  # fmt: skip
            check_dependencies(request.case, verdict)
            return JudgeReply(request=request.digest, verdict=as_it_travels(verdict))
        except (HarnessError, NoGpu) as error:  # a GPU was there when the judge began
            return self._fault(request, FaultCode.HARNESS, str(error))
        except UsageError as error:
            found = import_error(error)
            code = FaultCode.DEFINITION if isinstance(found, DefinitionMissing) else FaultCode.MISUSE
            return self._fault(request, code, str(found))
        except Exception as error:  # of any kind: what waits behind this request is judged all the same
            message = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
            return self._fault(request, FaultCode.HARNESS, message)

    def machine(self) -> Machine:
        """The record of this machine."""
        if self._gate is None:
            self._gate = Gate(self.platform, self._local)
        return self._gate.machine()

    def close(self) -> None:
        """End the gate's processes."""
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.close()

    def _gate_for(self, request: JudgeRequest) -> Gate:
        settings = gate_settings(request, self._local)
        if self._gate is None or self._gate.settings != settings:
            self.close()
            self._gate = Gate(self.platform, settings)
        return self._gate

    def _fault(self, request: JudgeRequest, code: FaultCode, message: str) -> JudgeReply:
        device = self._gate.machine().device_uuid if self._gate is not None else ""
        fault = MachineFault(code=code, message=message, device=device or self.platform)
        return JudgeReply(request=request.digest, fault=fault)
