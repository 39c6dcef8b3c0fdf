"""Seats of this host and their templates, which are fakes here."""

from types import SimpleNamespace

import pytest
from simulated_runs import BASELINE, FACTS

from autotune.data.errors import WorkloadError
from autotune.data.facts import ScriptFacts, ScriptSettings, Trains, WorkloadReference
from autotune.runtime import local
from autotune.runtime.executor import SeatLost
from autotune.runtime.local import LocalExecutor
from autotune.runtime.places import cut_cores
from autotune.runtime.protocol import TemplateReady
from autotune.runtime.template_process import TemplateDied

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

        def wait_ready(self, longest_seconds=0.0):
            if started.deaths:
                started.deaths -= 1
                raise TemplateDied("gone")
            return started.ready

        def close(self):
            self.alive, self.closed = False, True

    monkeypatch.setattr(local, "Template", Template)
    monkeypatch.setattr(local, "TrialProcess", lambda template, request, profile, asked: (template, request, asked))
    return started


def launched(executor, configuration=BASELINE, **how):
    """The template, the request, and what was asked for where it was scaled."""
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


def test_a_template_that_is_gone_is_cleared_away_and_started_again(templates, tmp_path):
    with LocalExecutor(REFERENCE, logs=tmp_path) as executor:
        executor.open()
        templates.all[0].alive = False
        assert launched(executor)[0] is templates.all[1]
        assert templates.all[0].closed


@pytest.mark.parametrize(("deaths", "starts"), [(1, 2), (2, 0)])
def test_a_template_that_dies_at_its_first_use_is_started_once_more(templates, tmp_path, deaths, starts):
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


def test_each_seat_has_cores_of_its_own_and_the_whole_has_all(templates, tmp_path):
    wide = BASELINE.replace(intra_op_threads=4)
    with LocalExecutor(REFERENCE, logs=tmp_path, places=cut_cores(2, [0, 1, 2, 3])) as executor:
        executor.open()
        assert executor.seats == ("cpu0", "cpu1")
        template, request, asked = launched(executor, wide, seat="cpu1")
        assert template.variables == {"AUTOTUNE_CORES": "2,3"}
        assert (request.configuration["intra_op_threads"], asked) == (2, {"intra_op_threads": 4})
        template, request, asked = launched(executor, wide, seat=executor.whole)
        assert (template.variables, request.configuration["intra_op_threads"], asked) == ({}, 4, {})


def test_a_seat_that_is_dropped_ends_its_templates_and_takes_no_trials(templates, tmp_path):
    with LocalExecutor(REFERENCE, logs=tmp_path, places=cut_cores(2, [0, 1])) as executor:
        executor.open()
        template, *_ = launched(executor, seat="cpu1")
        executor.drop("cpu1")
        assert template.closed
        assert not templates.all[0].closed
        assert executor.seats == ("cpu0",)
        with pytest.raises(SeatLost, match="cpu1 is gone"):
            launched(executor, seat="cpu1")


def test_what_no_fork_survives_gives_each_trial_a_fresh_interpreter(templates, tmp_path):
    templates.ready = TemplateReady(workload=FACTS, started="threads")
    with LocalExecutor(REFERENCE, logs=tmp_path) as executor:
        executor.open()
        assert (executor.isolation, executor.started_by_import) == ("spawn", "threads")
        assert templates.all[0].closed
        template, *_ = launched(executor, BASELINE.replace(onednn=False))
        assert (template.mode, template.variables) == ("later", {})
        assert not executor.needs_different_template(BASELINE, BASELINE.replace(onednn=False))


def test_a_script_that_was_run_before_is_known_and_knobs_win_over_its_variables(templates, tmp_path, monkeypatch):
    monkeypatch.setattr(local, "fingerprint_of_script", lambda reference: FACTS.fingerprint)
    script = ScriptFacts(trains=Trains.FIT, baseline={}, variables={"TF_ENABLE_ONEDNN_OPTS": "1", "OWN": "x"})
    templates.ready = TemplateReady(workload=FACTS.model_copy(update={"script": script}))
    with LocalExecutor(REFERENCE, logs=tmp_path) as executor:
        executor.open()
        template, request, _ = launched(executor, BASELINE.replace(onednn=False))
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
def test_what_trials_write_is_kept_in_layers_unless_the_user_allows_it(templates, tmp_path, allow_writes):
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
