"""Actions hold: under every scheduler, with several optimisers, over a resumed run, and none but Stop ends a run."""

import copy
import inspect
import io
import logging
import warnings

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Muon, lr_scheduler, swa_utils
from transformers import get_scheduler, optimization

import hand_written
from locater.errors import Refusal
from locater.monitor import Action, Attach, AttentionMonitor, Checkpoint, JsonLines, RollBack, Stop
from locater.monitor.actions import Event, OwnLoop, Responses
from locater.monitor.alarms import Alarm
from locater.monitor.report import Report
from locater.stabilisers import EntropyBonus, LocAteR, QKClip, QKDecay, QKNorm, SoftCap, ZLoss

STEPS = 120


def warm_up(step):
    return min(1.0, (step + 1) / 10)


def chained(optimizer):
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(optimizer, 0.99), lr_scheduler.StepLR(optimizer, 30)]
    )


def sequential(optimizer):
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10), lr_scheduler.CosineAnnealingLR(optimizer, STEPS)]
    return lr_scheduler.SequentialLR(optimizer, parts, [10])


def of_transformers(name, **options):
    steps = dict(num_warmup_steps=10, num_training_steps=STEPS, scheduler_specific_kwargs=options or None)
    return lambda optimizer: get_scheduler(name, optimizer, **steps)


SCHEDULERS = {
    "none": lambda optimizer: None,
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, warm_up),
    "MultiplicativeLR": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.98),
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 20),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [25, 60]),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.97),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
    "WarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 15),
    "PolynomialLR": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, STEPS),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=4),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 1e-4, 1e-2, step_size_up=12, cycle_momentum=False),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=STEPS + 1),
    "chained": chained,
    "sequential": sequential,
    "linear": of_transformers("linear"),
    "cosine": of_transformers("cosine"),
    "inverse square root": of_transformers("inverse_sqrt"),
    "warm-up, stable, decay": of_transformers("warmup_stable_decay", num_decay_steps=30),
    "ConstantLR": lambda optimizer: lr_scheduler.ConstantLR(optimizer, total_iters=40),
    "SWALR": lambda optimizer: swa_utils.SWALR(optimizer, 1e-4, anneal_epochs=20),
    "AdafactorSchedule": lambda optimizer: optimization.AdafactorSchedule(optimizer, 1e-3),
    "GreedyLR": lambda optimizer: optimization.GreedyLR(optimizer, patience=2, min_lr=1e-5, smooth=True, window_size=4),
    "polynomial": of_transformers("polynomial"),
    "constant": of_transformers("constant"),
    "constant_with_warmup": of_transformers("constant_with_warmup"),
    "cosine_with_restarts": of_transformers("cosine_with_restarts"),
    "cosine_with_min_lr": of_transformers("cosine_with_min_lr", min_lr=1e-5),
    "cosine_warmup_with_min_lr": of_transformers("cosine_warmup_with_min_lr", min_lr=1e-5),
}
OTHER_NAMES = {
    "CosineAnnealingWarmRestarts": "WarmRestarts", "ChainedScheduler": "chained", "SequentialLR": "sequential",
    "LinearLR": "sequential", "inverse_sqrt": "inverse square root", "warmup_stable_decay": "warm-up, stable, decay",
    "reduce_lr_on_plateau": "ReduceLROnPlateau", "greedy": "GreedyLR",
}  # fmt: skip
JUDGES = (lr_scheduler.ReduceLROnPlateau, optimization.GreedyLR)


def test_no_scheduler_of_torch_or_transformers_is_left_out():
    """A class that a new version brings must be tried here too."""
    names = [str(kind.value) for kind in optimization.TYPE_TO_SCHEDULER_FUNCTION]
    for module in (lr_scheduler, swa_utils, optimization):
        classes = [one for one in vars(module).values() if inspect.isclass(one) and hasattr(one, "get_last_lr")]
        names += [one.__name__ for one in classes if one.__module__ == module.__name__]
    bases = {"LRScheduler", "_LRScheduler"}
    assert {OTHER_NAMES.get(name, name) for name in names} - bases <= SCHEDULERS.keys()


class Loop:
    """Two optimisers under a scheduler each, a record of the rates with which they stepped; weights go round in it."""

    def __init__(self, make, action=None):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        matrices = [one for one in self.model.parameters() if one.dim() == 2]
        vectors = [one for one in self.model.parameters() if one.dim() == 1]
        self.optimizers = [Muon(matrices, lr=1e-2, weight_decay=0.0), AdamW(vectors, lr=1e-3)]
        self.schedulers = [make(one) for one in self.optimizers]
        self.host, self.used, self.action, self.step = OwnLoop(self.model, self.optimizers), [], action, 0
        if action is not None:
            action.begin(self.model, self.host, None)
        for optimizer in self.optimizers:
            optimizer.register_step_pre_hook(lambda one, *given: self.used.append(one.param_groups[0]["lr"]))

    def run(self, num_steps, act_at=()):
        for _ in range(num_steps):
            loss = self.model(torch.ones(3, 4)).square().mean()
            loss.backward()
            for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                if isinstance(scheduler, JUDGES):
                    scheduler.step(1.0)
                elif scheduler is not None:
                    scheduler.step()
            self.step += 1
            if self.action is not None:
                assert self.action.check(self.host) is None
                if self.step in act_at:
                    self.action(Event(Report(self.step, ()), self.model, self.host))
        return self

    def state(self):
        parts = [*self.optimizers, *(one for one in self.schedulers if one is not None), self.model, self.action]
        file = io.BytesIO()
        torch.save([part.state_dict() for part in parts], file)
        file.seek(0)
        return file

    def load(self, file):
        parts = [*self.optimizers, *(one for one in self.schedulers if one is not None), self.model, self.action]
        for part, state in zip(parts, torch.load(file, weights_only=False), strict=True):
            part.load_state_dict(state)
        return self


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_step_after_a_roll_back_has_the_factor_times_the_scheduled_rate(name):
    plain = Loop(SCHEDULERS[name]).run(STEPS)
    rolled = Loop(SCHEDULERS[name], RollBack(0.5)).run(STEPS, act_at=(10, 15))
    expected = [rate * (1.0 if n < 20 else 0.5 if n < 30 else 0.25) for n, rate in enumerate(plain.used)]
    assert rolled.used == pytest.approx(expected, rel=1e-15, abs=0.0)
    assert [one.param_groups[0]["lr"] for one in rolled.optimizers] == [
        one.param_groups[0]["lr"] for one in plain.optimizers
    ]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_resumed_run_goes_on_to_the_bit(name):
    whole = Loop(SCHEDULERS[name], RollBack(0.3)).run(60, act_at=(10,))
    half = Loop(SCHEDULERS[name], RollBack(0.3)).run(30, act_at=(10,))
    resumed = Loop(SCHEDULERS[name], RollBack(0.3)).load(half.state()).run(30)
    assert resumed.used == whole.used[60:]
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_what_undoes_a_roll_back_is_told_once():
    class Stubborn(SGD):
        def step(self, closure=None):
            self.param_groups[0]["lr"] = 0.1
            return super().step(closure)

    model = nn.Linear(3, 3)
    stubborn, idle = Stubborn(model.parameters(), lr=0.1), SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    action, host = RollBack(0.5), OwnLoop(model, [stubborn, idle])
    action.begin(model, host, None)
    action(Event(Report(1, ()), model, host))
    found = []
    for _ in range(12):
        stubborn.step()
        found.append(action.check(host))
    told = [words for words in found if words]
    assert len(told) == 2 and "sets its learning rate within its step" in told[0]
    assert "optimiser 1 (SGD) has not stepped" in told[1]


def test_a_rate_that_is_no_number_is_refused_at_the_start():
    model = nn.Linear(3, 3)
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = None  # as Adafactor has it, which chooses its own
    with pytest.raises(Refusal, match="a learning rate that is a number"):
        RollBack().begin(model, OwnLoop(model, [optimizer]), None)


def test_a_tensor_as_rate_stays_the_same_tensor():
    model = nn.Linear(3, 3)
    optimizer = AdamW(model.parameters(), lr=torch.tensor(0.5), capturable=False, foreach=False)
    rate, used, action = optimizer.param_groups[0]["lr"], [], RollBack(0.5)
    action.begin(model, host := OwnLoop(model, [optimizer]), None)
    optimizer.register_step_pre_hook(lambda one, *given: used.append(float(one.param_groups[0]["lr"])))
    action(Event(Report(1, ()), model, host))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert used == [0.25] and optimizer.param_groups[0]["lr"] is rate and float(rate) == 0.5


# A whole run, of a model that no table knows, whose weights explode at one step.


class Run:
    """A decoder of one's own, AdamW alone or with Muon, a scheduler; `explode` makes layer 1's logits huge."""

    def __init__(self, on_alarm, schedule="LambdaLR", optimisers="AdamW", attention=hand_written.Fused, **options):
        torch.manual_seed(0)
        self.model = hand_written.decoder(attention).train()
        weights = list(self.model.parameters())
        matrices = [one for one in weights if one.dim() == 2 and optimisers != "AdamW"]
        others = [one for one in weights if not any(one is other for other in matrices)]
        self.optimizers = [Muon(matrices, lr=1e-3)] if matrices else []
        self.optimizers.append(AdamW(others, lr=1e-3))
        self.schedulers = [SCHEDULERS[schedule](one) for one in self.optimizers]
        self.others = [*(one for one in self.schedulers if one is not None), torch.amp.GradScaler("cpu", enabled=False)]
        self.monitor = AttentionMonitor(
            self.model, every=1, optimizer=[*self.optimizers, *self.others], on_alarm=on_alarm, **options
        )
        self.reports = []
        self.explodes = next(name for name, _ in self.model.stack[1].mixer.named_parameters() if "weight" in name)
        self.explodes = f"stack.1.mixer.{self.explodes}"

    def run(self, num_steps, explode_at=None):
        for step in range(num_steps):
            if step == explode_at:
                with torch.no_grad():
                    self.model.get_parameter(self.explodes).mul_(1e3)
            loss = self.model(hand_written.TOKENS).square().mean()
            loss.backward()
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for scheduler in self.schedulers:
                scheduler.step(*([float(loss.detach())] if isinstance(scheduler, JUDGES) else []))
            self.reports.append(self.monitor.step())
            if self.monitor.should_stop:
                break
        return self

    def lines(self):
        return [line for report in self.reports for line in report.actions]


SCHEDULES = ("LambdaLR", "OneCycleLR", "ReduceLROnPlateau")
ACTIONS = {
    "roll back": lambda folder: RollBack(0.5),
    "attach QKClip": lambda folder: Attach(QKClip, threshold=20.0),
    "attach LocAteR": lambda folder: Attach(LocAteR, strength=1e-3),
    "checkpoint": lambda folder: Checkpoint(folder / "alarm-{step}.pt"),
    "stop": lambda folder: Stop(),
}
SAID = {
    "roll back": "rolled back to the state after step 0",
    "attach QKClip": "attached QKClip",
    "attach LocAteR": "attached LocAteR",
    "checkpoint": "saved the state after this step",
    "stop": "stopped",
}


@pytest.mark.parametrize("optimisers", ["AdamW", "Muon and AdamW"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.filterwarnings("ignore:Muon's steps")
def test_an_own_model_under_every_schedule_and_action(action, schedule, optimisers, tmp_path, caplog):
    made = ACTIONS[action](tmp_path)
    with caplog.at_level(logging.WARNING, "locater.monitor"):
        run = Run(made, schedule, optimisers, sinks=[JsonLines(tmp_path / "log.jsonl")]).run(5, explode_at=2)
    (line,) = [line for line in run.lines() if SAID[action] in line]
    assert line.startswith("step 2: ") and "because of logit explosion in decoder layer 1" in line
    assert line in run.reports[2].summary() and line in caplog.text and line in (tmp_path / "log.jsonl").read_text()
    assert len(run.reports) == (3 if action == "stop" else 5)
    largest = run.reports[-1].training[1].mean("max_logit")
    if action in ("roll back", "attach QKClip"):
        assert largest < 25.0
    if action == "checkpoint":
        saved = torch.load(tmp_path / "alarm-2.pt", weights_only=False)
        assert len(saved["others"]) == len(run.optimizers) + 1 and len(saved["model"]) == len(run.model.state_dict())
    run.monitor.detach()


@pytest.mark.parametrize("action", [RollBack(0.5), Attach(QKClip, threshold=20.0), Attach(LocAteR, strength="auto")])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_with_its_monitor_is_resumed_to_the_bit(action, schedule):
    """Saved two steps after the alarm, and taken up by other objects."""
    half = Run(copy.deepcopy(action), schedule).run(4, explode_at=1)
    parts = lambda run: [run.model, *run.optimizers, *run.schedulers, run.monitor]  # noqa: E731
    states = copy.deepcopy([part.state_dict() for part in parts(half)])
    whole = half.run(3)
    resumed = Run(copy.deepcopy(action), schedule)
    for part, state in zip(parts(resumed), states, strict=True):
        part.load_state_dict(state)
    resumed.run(3)
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert [report.step for report in resumed.reports] == [4, 5, 6]


def test_what_an_action_will_need_is_tried_at_the_first_call():
    """SoftCap cannot stand in a module whose attention calls no kernel; a fresh run hears it, not one in trouble."""
    run = Run(Attach(SoftCap, cap=20.0, heads=[("embed", "readout", 4, 4)]))
    with pytest.raises(Refusal, match="on_alarm"):
        run.run(1)
    run = Run(RollBack())
    run.monitor.host.optimizers = []
    with pytest.raises(Refusal, match="an optimiser to roll back"):
        run.run(1)


@pytest.mark.parametrize(
    "act",
    [
        Attach(ZLoss, weight=1e-4),
        Attach(EntropyBonus, weight=1e-4),
        Attach(LocAteR, strength=1e-3),
        Attach(QKDecay, decay=0.1),
    ],
)
def test_what_acts_by_the_loss_is_refused_at_the_first_call(act):
    model = hand_written.decoder(hand_written.Fused).train()
    with AttentionMonitor(model, on_alarm=act), pytest.raises(Refusal, match=f"on_alarm: .*{act.name}, which acts by"):
        model(hand_written.TOKENS)


def test_what_makes_no_stabiliser_is_refused_when_it_is_said():
    with pytest.raises(Refusal, match="what makes a stabiliser"):
        Attach("QKClip")
    with pytest.raises(TypeError, match="treshold"):
        Attach(QKClip, treshold=50.0)


def test_trying_changes_nothing_and_is_not_watched():
    plain, tried = Run(None).run(3), Run(Attach(QKNorm)).run(3)
    for one, other in zip(plain.model.parameters(), tried.model.parameters(), strict=True):
        assert torch.equal(one, other)
    attached = Run(Attach(QKNorm)).run(6, explode_at=2)  # which finds the heads again, at the alarm
    assert attached.lines() and not any(report.evaluation for report in (*tried.reports, *attached.reports))
    assert [layer.statistics for layer in plain.reports[0].training] == [
        layer.statistics for layer in tried.reports[0].training
    ]


def test_a_stabiliser_with_parameters_comes_under_a_scheduler_that_counts_groups():
    run = Run(Attach(QKNorm), optimisers="Muon and AdamW").run(6, explode_at=2)
    gains = run.monitor.stabilisers[0].parameters()
    assert len(run.reports) == 6 and all(
        any(one is gain for one in run.optimizers[1].param_groups[-1]["params"]) for gain in gains
    )
    assert any(bool((gain != 1).any()) for gain in gains), "they are trained"


def test_no_action_ends_a_run_but_stop():
    class Failing(Action):
        def __call__(self, event):
            raise RuntimeError("no space left")

    class Breaking(QKClip):
        def step(self):
            raise RuntimeError("broken")

    with pytest.warns(UserWarning, match="Failing could not act: RuntimeError: no space left"):
        run = Run([Failing(), Attach(Breaking, threshold=20.0), RollBack(0.5, most=1)]).run(6, explode_at=2)
    assert len(run.reports) == 6
    assert any("Failing could not act" in line for line in run.lines())
    assert any("took Breaking off, which failed: broken" in line for line in run.lines())


def test_roll_back_ends_the_run_only_where_it_is_told_to():
    def explode_always(**options):
        run = Run(RollBack(0.5, most=2, **options))
        run.run(1)
        for _ in range(4):
            run.run(1, explode_at=0)
        return run

    run = explode_always()
    assert not run.monitor.should_stop and sum("not rolled back" in line for line in run.lines()) == 1
    assert explode_always(then=Stop()).monitor.should_stop


def test_averaged_weights_go_back_with_the_weights():
    run = Run(RollBack(0.5))
    average = swa_utils.AveragedModel(run.model)
    run.monitor.host.others.append(average)
    run.run(1)
    average.update_parameters(run.model)
    before = copy.deepcopy(average.state_dict())
    run.run(2)
    average.module.readout.weight.data.fill_(7.0)
    run.run(2, explode_at=0)
    assert torch.equal(average.state_dict()["module.readout.weight"], before["module.readout.weight"])


def test_constructing_attaches_and_detach_ends():
    model = hand_written.decoder(hand_written.Fused).train()
    monitor = AttentionMonitor(model, every=1)
    model(hand_written.TOKENS)
    assert monitor.step().training
    monitor.detach()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(hand_written.TOKENS)
    with pytest.raises(Refusal, match="an attached monitor"):
        monitor.step()
    with monitor:
        model(hand_written.TOKENS)
        assert monitor.step().training
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_an_action_without_a_name_leaves_resting_heads_alone():
    """Dead heads are told, and acted on by their name only; a function hears of them."""
    resting = Alarm("dead heads (uniform)", "decoder", 0, (1,), 1.0, 0.9995, "", "")
    heard, done = [], []

    class Counted(Action):
        def __init__(self, name):
            self.name = name

        def __call__(self, event):
            done.append(self.name)

    table = Responses({"": [Counted("any"), heard.append], "dead heads (uniform)": Counted("named")})
    table.act(Event(Report(1, (), alarms=(resting,)), nn.Linear(1, 1), OwnLoop(nn.Linear(1, 1))))
    assert done == ["named"] and len(heard) == 1


def test_heads_that_an_explosion_woke_are_not_dead_once_it_is_undone():
    """Layer 1 begins as good as uniform; a thousandfold weight tells keys apart, and the state goes back."""
    run = Run(RollBack(0.5))
    with torch.no_grad():
        run.model.get_parameter(run.explodes).mul_(1e-3)
    run.run(2).run(1, explode_at=0)
    with torch.no_grad():
        run.model.get_parameter(run.explodes).mul_(1e3)
    run.run(4)
    assert not any(alarm.kind.startswith("dead") for report in run.reports for alarm in report.alarms)


def test_a_resumed_step_that_makes_its_own_call_has_the_factor():
    """Lightning, and whoever passes a closure, calls the model for the first time within the optimiser's step."""

    def steps(run, num_steps, used):
        for optimizer in run.optimizers:
            optimizer.register_step_pre_hook(lambda one, *given: used.append(one.param_groups[0]["lr"]))

        def closure():
            run.optimizers[0].zero_grad()
            loss = run.model(hand_written.TOKENS).square().mean()
            loss.backward()
            return loss

        for _ in range(num_steps):
            run.optimizers[0].step(closure)
            run.monitor.step()

    whole = Run(RollBack(0.5), "StepLR").run(3, explode_at=1)
    parts = lambda run: [run.model, *run.optimizers, run.monitor]  # noqa: E731
    states = copy.deepcopy([part.state_dict() for part in parts(whole)])
    resumed, used = Run(RollBack(0.5), "StepLR"), []
    for part, state in zip(parts(resumed), states, strict=True):
        part.load_state_dict(state)
    steps(resumed, 2, used)
    assert used == [5e-4, 5e-4]


@pytest.mark.parametrize("attention", [hand_written.Normed, hand_written.NormedByHand, hand_written.TurnedThenNormed])
@pytest.mark.parametrize("make", [lambda **given: LocAteR(strength=1e-3, **given), QKClip])
def test_what_a_norm_would_undo_is_refused(make, attention):
    model = hand_written.decoder(attention).train()
    with pytest.raises(Refusal, match="QK-norm after the weights undoes their scale; the norm bounds the logits"):
        make(model=model, sample=hand_written.TOKENS)
    QKClip(model, log_only=True, sample=hand_written.TOKENS).detach()


def test_our_own_qk_norm_is_seen_too():
    model = hand_written.decoder(hand_written.Fused).train()
    norm = QKNorm(model, sample=hand_written.TOKENS)
    with pytest.raises(Refusal, match="QK-norm after the weights"):
        QKClip(model, sample=hand_written.TOKENS)
    norm.detach()
    QKClip(model, sample=hand_written.TOKENS).detach()


@pytest.mark.parametrize("name", ["ReduceLROnPlateau", "GreedyLR"])
def test_a_schedule_is_judged_by_the_losses_of_the_weights_that_are_there(name):
    """Losses of weights that a roll-back undoes leave nothing behind: no best, no count, no mean with a NaN in it."""
    run = Run(RollBack(0.5), name).run(1)
    scheduler = run.schedulers[0]
    judged = lambda: {k: v for k, v in scheduler.state_dict().items() if k not in ("last_epoch", "_last_lr")}  # noqa: E731
    kept, count = copy.deepcopy(judged()), scheduler.last_epoch
    run.run(1)
    for _ in range(2):
        scheduler.step(float("nan"))
    scheduler.best = 0.0  # as of an explosion that copies the batch
    run.run(1, explode_at=0)
    assert any("rolled back" in line for line in run.lines())
    assert judged() == kept, "as after the step whose state is back"
    assert scheduler.last_epoch == count + 4
    assert [run.optimizers[0].param_groups[0]["lr"]] == scheduler.get_last_lr(), "the rate goes on"


def test_each_parameter_gets_its_own_state_back_after_another_came_into_an_earlier_group():
    """As when layers are thawed: a state is kept by number, and numbers behind the new parameter have moved."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    first, second = [list(part.parameters()) for part in model]
    optimizer = AdamW([{"params": first[:1]}, {"params": second}], lr=1e-2)
    action, host = RollBack(0.5), OwnLoop(model, [optimizer])

    def step():
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    action.begin(model, host, None)
    step()
    for number in (1, 2):  # the state of the first is good now
        action.good(Event(Report(number, ()), model, host))
    kept = {one: copy.deepcopy(optimizer.state[one]) for one in (first[0], *second)}
    optimizer.param_groups[0]["params"].append(first[1])
    step()
    action(Event(Report(3, ()), model, host))
    for one, state in kept.items():
        assert all(torch.equal(optimizer.state[one][name], value) for name, value in state.items())
    step()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(Refusal, match="a folder that can be made"):
        Run(Checkpoint(tmp_path / "file" / "alarm.pt")).run(1)
