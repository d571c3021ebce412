"""The desk of a Ray cluster: one queue by priority for all who ask, a judge for each device, canaries and quarantine.

It is an actor on the head node. Judges come with their nodes and go with them; what they had in hand goes to another
device. A verdict is final; a machine's fault is not, at most twice. The desk believes sealed replies only.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import secrets
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pytest_klineage.errors import BadRecord
from pytest_klineage.executors.builds import Builds
from pytest_klineage.executors.canary import Canaries, measured
from pytest_klineage.executors.cluster import (
    CPU_RESOURCE,
    ClusterLimits,
    DeskState,
    JudgeState,
    Place,
    last_line,
    places_of,
    pool_name,
)
from pytest_klineage.executors.queueing import Outbox, Queue, QueuedJudgement
from pytest_klineage.executors.ray_judge import Introduction, Judge, Order
from pytest_klineage.executors.sealing import open_reply, read_secret, seal_reply
from pytest_klineage.gate.settings import default_cache_dir
from pytest_klineage.records import from_json, to_json
from pytest_klineage.records.judging import MOST_FAULTS, FaultCode, JudgeReply, MachineFault

FAULTS_TO_QUARANTINE = 2


@dataclass
class Seat:
    """A place for a judge: a node and one of its devices, with what has happened there."""

    state: JudgeState
    handle: Any
    since_canary: list[QueuedJudgement] = field(default_factory=list)
    due: bool = True
    """Whether a canary comes next."""
    freed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def pool(self) -> str:
        return pool_name(self.state.platform, self.state.product)


class Desk:
    """All state of a cluster's judging, in one asyncio process."""

    def __init__(self, limits: bytes = b"{}", judge_class: type = Judge) -> None:
        self.limits = msgspec.json.decode(limits, type=ClusterLimits)
        self.incarnation = secrets.token_hex(8)
        self._judge_class = judge_class
        self._secret = read_secret()
        self._canaries = Canaries(default_cache_dir() / "judges" / "pools.json")
        self._outbox = Outbox(self._secret)
        self._queue, self._work = Queue(), asyncio.Condition()
        self._builds = Builds(self._secret, self._outbox.answer, self._put)
        self._seats: dict[Place, Seat] = {}
        self._device_faults: collections.Counter[str] = collections.Counter()
        self._judging, self._refused = 0, 0
        self._products: dict[str, set[str]] = {}
        self._running: set[asyncio.Future[Any]] = set()
        self._begun, self._cpus = False, 0
        self._unfit: dict[Place, str] = {}
        """Places where no judge of that platform can start, and why."""
        self._trouble = ""
        """Why the last look at the nodes failed."""
        self._platforms: set[str] = set()

    # --- what askers call -------------------------------------------------------------------------------------------

    async def submit(self, asker: str, orders: list[bytes]) -> str:
        """Take orders. One that is known, by digest and ticket, is not taken twice; its answer goes to who asks now."""
        await self._begin()
        for data in orders:
            order = from_json(data, Order)
            if (task := self._outbox.take_order(order, data, asker)) is not None:
                self._platforms.add(order.platform)
                await self._prepare(task)
        return self.incarnation

    async def replies(
        self, asker: str, fetched: list[tuple[str, str]], doubted: list[tuple[str, str]], wait_s: float
    ) -> tuple[str, list[bytes]]:
        """Sealed replies and doubts for an asker, after at most `wait_s`.

        `fetched` and `doubted` name, by digest and ticket, the replies and the doubts that it has on its disk.
        """
        await self._begin()
        self._outbox.forget(fetched)
        self._outbox.forget_doubts(asker, doubted)
        return self.incarnation, await self._outbox.take(asker, wait_s)

    async def state(self) -> bytes:
        """The cluster's state, as JSON of DeskState."""
        await self._begin()
        await self._look_at_nodes()
        state = DeskState(
            judges=[seat.state for seat in self._seats.values()],
            queued=self._queue.lengths(), judging=self._judging, refused=self._refused,
            building=len(self._builds), unfetched=self._outbox.unfetched,
            verdicts_per_minute=self._outbox.verdicts_per_minute,
            products={name: sorted(found) for name, found in self._products.items()},
            unfit=[*self._unfit.values(), *filter(None, [self._trouble])],
        )  # fmt: skip
        return to_json(state)

    async def set_pools(self, pools: bytes) -> None:
        """Take canaries by pool, and keep them on disk. Each judge of these pools begins again with its canary."""
        self._canaries.update(pools)
        for seat in self._seats.values():
            seat.due = True

    async def warm(self, platform: str) -> None:
        """Start the judges of a platform, though nothing is asked of them."""
        self._platforms.add(platform)
        await self._begin()

    async def release(self) -> int:
        """Forget faults of devices, and let those in quarantine begin again with a canary. Returns how many."""
        self._device_faults.clear()
        self._unfit.clear()
        held = [seat for seat in self._seats.values() if seat.state.state == "quarantine"]
        for seat in held:
            seat.freed.set()
        return len(held)

    # --- the queue --------------------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        if not self._begun:
            await self._look_at_nodes()
            if not self._begun:  # another call may have begun meanwhile
                self._begun = True
                self._spawn(self._tend())

    def _spawn(self, work: Any) -> asyncio.Future[Any]:
        task: asyncio.Future[Any] = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _prepare(self, task: QueuedJudgement) -> None:
        """Queue a task, before its judgement for a build where that can be done on a CPU."""
        if task.order.recipe and self._cpus:
            self._builds.add(task, self._cpus)
        else:
            await self._put(task)

    async def _put(self, task: QueuedJudgement) -> None:
        async with self._work:
            self._queue.put(task)
            self._work.notify_all()

    async def _next(self, seat: Seat) -> QueuedJudgement:
        """The first task of the seat's pool that has not met a fault on its device."""
        async with self._work:
            while (task := self._queue.take(seat.pool, seat.state.device)) is None:
                await self._work.wait()
        return task

    # --- judges -----------------------------------------------------------------------------------------------------

    async def _serve(self, seat: Seat) -> None:
        """One judge, from its start until it is lost."""
        import ray

        try:
            if not await self._start(seat):
                return
            while True:
                if seat.due and not await self._canary(seat):
                    continue
                seat.state.state = "ready"
                await self._judge(seat, await self._next(seat))
        except ray.exceptions.RayTaskError as error:
            await self._quarantine(seat, last_line(error))
        except (ray.exceptions.RayError, TimeoutError):
            if seat.state.device:
                self._device_faults[seat.state.device] += 1
        finally:
            self._leave(seat)

    async def _start(self, seat: Seat) -> bool:
        """Have the judge find its device. False where it cannot; the place is left alone then."""
        import ray

        try:
            async with asyncio.timeout(self.limits.start_s):
                data = await seat.handle.start.remote()
        except ray.exceptions.RayTaskError as error:
            position = next(position for position, other in self._seats.items() if other is seat)
            self._unfit[position] = f"{seat.state.name}: {last_line(error)}"
            return False
        said, state = from_json(data, Introduction), seat.state
        state.machine, state.host, state.device, state.why = said.machine, said.host, said.device, said.note
        return True

    def _leave(self, seat: Seat) -> None:
        import ray

        with contextlib.suppress(Exception):  # a judge whose node is gone cannot be killed
            ray.kill(seat.handle)
        self._seats = {position: other for position, other in self._seats.items() if other is not seat}

    async def _judge(self, seat: Seat, task: QueuedJudgement) -> None:
        """Have a task judged; a judge that is lost meanwhile is its task's fault of a machine, and ends its seat."""
        import ray

        seat.state.state, self._judging = "judging", self._judging + 1
        try:
            async with asyncio.timeout(self.limits.judge_s):
                line = await seat.handle.judge.remote(task.data, task.attempt, task.artifact)
        except (ray.exceptions.RayError, TimeoutError) as error:
            lost = isinstance(error, ray.exceptions.RayActorError | TimeoutError)
            code, why = (FaultCode.DIED, "was lost") if lost else (FaultCode.HARNESS, "failed")
            message = f"the judge {seat.state.name} {why}: {type(error).__name__}: {last_line(error)}"
            await self._fault(seat, task, MachineFault(code=code, message=message, device=seat.state.device))
            raise
        finally:
            self._judging -= 1
        try:
            reply = self._believed(seat, task, line)
        except BadRecord as error:
            self._refused += 1
            why = f"a reply was refused: {error}"
            await self._fault(seat, task, MachineFault(code=FaultCode.HARNESS, message=why, device=seat.state.device))
            await self._quarantine(seat, why)
            return
        await self._settle(seat, task, reply, line)

    def _believed(self, seat: Seat, task: QueuedJudgement, line: bytes) -> JudgeReply:
        """The reply, if this judge gave it to this task now. Raises BadRecord."""
        reply = open_reply(line, self._secret)
        said = reply.request, reply.ticket, reply.attempt, reply.judge
        if said != (task.order.digest, task.order.ticket, task.attempt, seat.state.name):
            raise BadRecord(f"it is an old one, or another judge's: {reply.judge}, attempt {reply.attempt}")
        if reply.verdict is not None and reply.product != task.order.product:
            raise BadRecord(f"it comes from a {reply.product}, not from a {task.order.product}")
        return reply

    async def _settle(self, seat: Seat, task: QueuedJudgement, reply: JudgeReply, line: bytes) -> None:
        if reply.fault is None or reply.fault.is_final:
            self._device_faults[seat.state.device] = 0
            seat.state.verdicts += 1
            seat.since_canary.append(task)
            seat.due = seat.due or len(seat.since_canary) >= self._canaries.every(
                seat.state.platform, seat.state.product
            )
            await self._outbox.answer(task, line)
            return
        if reply.fault.code is FaultCode.DEFINITION:  # of what is installed there, not of the device
            await self._again(task, reply.fault, seat.state.device)
            return
        if reply.fault.code is FaultCode.ARTIFACT:  # of no machine: built again, and perhaps judged here
            self._builds.forget(task.order.recipe)
            await self._again(task, reply.fault, "")
            return
        await self._fault(seat, task, reply.fault)
        if self._device_faults[seat.state.device] >= FAULTS_TO_QUARANTINE:
            await self._quarantine(seat, f"two faults in a row: {reply.fault.message.splitlines()[0]}")

    async def _fault(self, seat: Seat, task: QueuedJudgement, fault: MachineFault) -> None:
        seat.state.faults += 1
        if fault.code is not FaultCode.DIED:  # a lost judge is counted where its seat ends
            self._device_faults[seat.state.device] += 1
        await self._again(task, fault, seat.state.device)

    async def _again(self, task: QueuedJudgement, fault: MachineFault, device: str) -> None:
        """Another device takes the task, unless that was the last attempt."""
        task.tried |= {device} - {""}
        task.fault = fault
        if task.attempt >= MOST_FAULTS:
            await self._give_up(task, fault)
            return
        task.attempt += 1
        task.artifact = b""
        await self._prepare(task)

    async def _give_up(self, task: QueuedJudgement, fault: MachineFault) -> None:
        reply = JudgeReply(
            request=task.order.digest, ticket=task.order.ticket, attempt=task.attempt, fault=fault, judge="desk",
            product=task.order.product,
        )  # fmt: skip
        await self._outbox.answer(task, seal_reply(reply, self._secret))

    # --- canaries and quarantine ------------------------------------------------------------------------------------

    async def _canary(self, seat: Seat) -> bool:
        """Judge the known pair. False after a quarantine, when the pair must be judged again."""
        seat.due, seat.state.state = False, "canary"
        if self._device_faults[seat.state.device] >= FAULTS_TO_QUARANTINE:
            await self._quarantine(seat, "judges were lost here twice in a row")
            return False
        if (canary := self._canaries.of(seat.state.platform, seat.state.product)) is None:
            return True
        order = Order(
            digest=canary.request.digest, ticket=secrets.token_hex(16), platform=seat.state.platform,
            product=canary.request.product, priority=0, recipe="", request=msgspec.Raw(to_json(canary.request)),
        )  # fmt: skip
        async with asyncio.timeout(self.limits.judge_s):
            line = await seat.handle.judge.remote(to_json(order), 1, b"")
        try:
            reply = self._believed(seat, QueuedJudgement(order, b"", ""), line)
        except BadRecord as error:
            self._refused += 1
            await self._quarantine(seat, f"the canary's reply was refused: {error}")
            return False
        seat.state.canary = measured(reply)
        if trouble := canary.trouble(reply):
            await self._quarantine(seat, trouble)
            return False
        seat.since_canary = []
        return True

    async def _quarantine(self, seat: Seat, why: str) -> None:
        """Hold the judge, and its device with it, until it is released; its verdicts since the canary are in doubt."""
        seat.state.state, seat.state.why = "quarantine", why
        for task in seat.since_canary:
            self._outbox.doubt(task, seat.state.name, why)
        seat.since_canary = []
        await self._outbox.notify()
        await seat.freed.wait()
        seat.freed.clear()
        seat.due = True

    # --- nodes ------------------------------------------------------------------------------------------------------

    async def _tend(self) -> None:
        """Keep a judge on every device of the platforms that were asked for, and give up what none can take."""
        while True:
            try:
                await self._tend_once()
                self._trouble = ""
            except Exception as error:  # Ray's own are of any kind; the next look may go well
                self._trouble = f"the desk's look at the nodes failed: {type(error).__name__}: {last_line(error)}"
            await asyncio.sleep(self.limits.tend_s)

    async def _tend_once(self) -> None:
        positions = await self._look_at_nodes()
        for position in positions.keys() - self._seats.keys() - self._unfit.keys():
            self._seat(position, positions[position])
        for position in self._seats.keys() - positions.keys():
            self._seats[position].freed.set()  # its node is gone: it finds that out, even in quarantine
        await self._give_up_the_hopeless()

    async def _look_at_nodes(self) -> dict[Place, str]:
        """Places for judges of the platforms that were asked for, with their products."""
        import ray

        nodes = await asyncio.get_running_loop().run_in_executor(None, ray.nodes)
        self._cpus = sum(int(node["Resources"].get("CPU", 0)) for node in nodes if node["Alive"])
        positions = places_of(nodes)
        products: dict[str, set[str]] = {}
        for (platform, _, _), product in positions.items():
            products.setdefault(platform, set()).add(product)
        self._products = products
        return {position: product for position, product in positions.items() if position[0] in self._platforms}

    def _seat(self, position: Place, product: str) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        platform, node, number = position
        device: dict[str, Any] = {"resources": {CPU_RESOURCE: 1}} if platform == "cpu" else {"num_gpus": 1}
        name = f"{platform}-{node[:8]}-{number}-{secrets.token_hex(3)}"
        actor = ray.remote(self._judge_class).options(
            num_cpus=0, max_restarts=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False), **device
        )
        state = JudgeState(name=name, platform=platform, product=product, node=node)
        seat = self._seats[position] = Seat(state, actor.remote(name, platform, product, node))
        self._spawn(self._serve(seat))

    async def _give_up_the_hopeless(self) -> None:
        """Answer with a fault what no device has been able to take for `alone_s`."""
        why = "no device that has not failed it, and is not in quarantine, is left: pytest-klineage judges"
        for pool in self._queue.lengths():
            seats = (seat.state for seat in self._seats.values() if seat.pool == pool)
            able = {state.device for state in seats if state.state != "quarantine"}
            for task in self._queue.take_hopeless(pool, able, self.limits.alone_s):
                await self._give_up(task, hopeless(f"{pool}: {why}", task.fault))


def hopeless(why: str, last: MachineFault | None) -> MachineFault:
    """The fault of a task that no device may take, with what the last one said."""
    if last is None:
        return MachineFault(code=FaultCode.DIED, message=why)
    return MachineFault(code=last.code, message=f"{last.message}; {why}", device=last.device)
