"""Seats of this host and their templates, which are fakes here."""

from types import SimpleNamespace

import pytest
from simulated_runs import BASELINE, FACTS

from autotune.data.errors import WorkloadError
from autotune.data.facts import ScriptFacts, ScriptSettings, Trains, WorkloadReference
from autotune.data.record import Place
from autotune.runtime import local
from autotune.runtime.executor import SeatLost
from autotune.runtime.local import LocalExecutor
from autotune.runtime.protocol import TemplateReady
from autotune.runtime.trial_process import TemplateDied

REFERENCE = WorkloadReference(file="/no/such/train.py")


@pytest.fixture
def templates(monkeypatch):
    """The templates that were started; `ready` is what they report, `deaths` how many die over their first use."""
    started = SimpleNamespace(all=[], ready=TemplateReady(workload=FACTS), deaths=0, waits=False)

    class Template:
        def __init__(self, reference, mode, *, variables, log, layers):
            self.mode, self.variables, self.log, self.layers = mode, dict(variables), log, layers
            self.alive, self.closed, self.waits = True, False, started.waits
            started.all.append(self)

        def wait_ready(self, longest_seconds=0.0, tell=str):
            if started.deaths:
                started.deaths -= 1
                raise TemplateDied("gone")
            return started.ready

        def close(self):
            self.alive, self.closed = False, True

    monkeypatch.setattr(local, "Template", Template)
    monkeypatch.setattr(local, "TrialProcess", lambda template, request, profile: (template, request))
    return started


def launched(executor, configuration=BASELINE, **how):
    """The template and the request."""
    return executor.launch(configuration, log="/l", data=None, **how)


def test_trials_of_the_same_environment_share_a_template(templates, tmp_path):
    with LocalExecutor(REFERENCE, logs=tmp_path) as executor:
        executor.open()
        assert launched(executor)[0] is launched(executor, BASELINE.replace(batch_size=64))[0] is templates.all[0]
        other, *_ = launched(executor, BASELINE.replace(onednn=False))
        assert other.variables == {"TF_ENABLE_ONEDNN_OPTS": "0"}
        assert executor.needs_different_template(BASELINE, BASELINE.replace(onednn=False))
    assert all(template.closed for template in templates.all)


def test_a_process_that_waits_for_another_environment_is_ended(templates, tmp_path):
    templates.waits = True
    with LocalExecutor(REFERENCE, logs=tmp_path) as executor:
        executor.open()
        templates.waits = False
        launched(executor, BASELINE.replace(onednn=False))
        assert [template.closed for template in templates.all] == [True, False]


def test_dead_template_is_closed_and_replaced(templates, tmp_path):
    with LocalExecutor(REFERENCE, logs=tmp_path) as executor:
        executor.open()
        templates.all[0].alive = False
        assert launched(executor)[0] is templates.all[1]
        assert templates.all[0].closed


@pytest.mark.parametrize(("deaths", "starts"), [(1, 2), (2, 0)])
def test_template_that_dies_at_first_use_is_restarted_once(templates, tmp_path, deaths, starts):
    templates.deaths = deaths

    def use(template):
        template.alive = not templates.deaths
        return template.wait_ready()

    with LocalExecutor(REFERENCE, logs=tmp_path) as executor:
        if starts:
            assert executor._handles["local"].use_template({}, use) == templates.ready
        else:
            with pytest.raises(TemplateDied):
                executor._handles["local"].use_template({}, use)


TWO_GPUS = [Place(seat=f"gpu{number}", host="here", devices=(f"GPU-{number}",)) for number in range(2)]


def test_dropped_seat_closes_its_templates_and_rejects_trials(templates, tmp_path):
    with LocalExecutor(REFERENCE, logs=tmp_path, places=TWO_GPUS) as executor:
        executor.open()
        template, *_ = launched(executor, seat="gpu1")
        executor.drop("gpu1")
        assert template.variables == {"CUDA_VISIBLE_DEVICES": "GPU-1"}
        assert template.closed
        assert not templates.all[0].closed
        assert executor.seats == ("gpu0",)
        with pytest.raises(SeatLost, match="gpu1 is gone"):
            launched(executor, seat="gpu1")


def test_workload_that_cannot_fork_gets_fresh_interpreters(templates, tmp_path):
    templates.ready = TemplateReady(workload=FACTS, started="threads")
    with LocalExecutor(REFERENCE, logs=tmp_path) as executor:
        executor.open()
        assert (executor.isolation, executor.started_by_import) == ("spawn", "threads")
        assert templates.all[0].closed
        template, *_ = launched(executor, BASELINE.replace(onednn=False))
        assert (template.mode, template.variables) == ("later", {})
        assert not executor.needs_different_template(BASELINE, BASELINE.replace(onednn=False))


def test_known_script_is_reused_and_knobs_override_variables(templates, tmp_path, monkeypatch):
    monkeypatch.setattr(local, "fingerprint_of_script", lambda reference: FACTS.fingerprint)
    script = ScriptFacts(trains=Trains.FIT, baseline={}, variables={"TF_ENABLE_ONEDNN_OPTS": "1", "OWN": "x"})
    templates.ready = TemplateReady(workload=FACTS.model_copy(update={"script": script}))
    with LocalExecutor(REFERENCE, logs=tmp_path) as executor:
        executor.open()
        template, request = launched(executor, BASELINE.replace(onednn=False))
        assert (template.mode, template.variables) == ("known", {"TF_ENABLE_ONEDNN_OPTS": "0", "OWN": "x"})
        assert request.script == script
        monkeypatch.setattr(local, "fingerprint_of_script", lambda reference: "sha256:01")
        with pytest.raises(WorkloadError, match="the file has changed since the run began"):
            launched(executor)


@pytest.mark.parametrize(("isolation", "mode", "seconds"), [("template", "shared", 0.5), ("spawn", "later", 20.5)])
def test_trials_share_a_start_unless_they_are_fresh_interpreters(
    templates, tmp_path, monkeypatch, isolation, mode, seconds
):
    monkeypatch.setattr(local, "fingerprint_of_script", lambda reference: FACTS.fingerprint)
    script = ScriptFacts(trains=Trains.FIT, baseline={}, before_seconds=0.5, shared_seconds=20.0)
    templates.ready = TemplateReady(workload=FACTS.model_copy(update={"script": script}))
    with LocalExecutor(REFERENCE, logs=tmp_path, isolation=isolation) as executor:
        assert executor.open().script.before_seconds == seconds
        template, *_ = launched(executor, BASELINE.replace(onednn=False))
        assert template.mode == mode


@pytest.mark.parametrize("allow_writes", [False, True])
def test_trial_writes_stay_in_layers_unless_writes_are_allowed(templates, tmp_path, allow_writes):
    reference = REFERENCE.model_copy(update={"script": ScriptSettings(allow_writes=allow_writes)})
    with LocalExecutor(reference, logs=tmp_path) as executor:
        executor.open()
        assert (templates.all[0].layers is None) is allow_writes


def test_a_workload_that_has_changed_is_not_measured(templates, tmp_path):
    with LocalExecutor(REFERENCE, logs=tmp_path) as executor:
        executor.open()
        templates.ready = TemplateReady(workload=FACTS.model_copy(update={"fingerprint": "sha256:01"}))
        with pytest.raises(WorkloadError, match="the file has changed since the run began"):
            launched(executor)
