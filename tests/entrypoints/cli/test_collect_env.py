from vllm.entrypoints.cli.collect_env import collect, run


def test_the_report_names_versions_and_never_a_value(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret-value")
    monkeypatch.setenv("VLLM_NO_SUCH_THING", "1")
    facts = collect()
    assert facts["torch"].startswith("2.")
    assert "VLLM_API_KEY" in facts["VLLM variables set"]
    assert facts["unknown among them"] == "VLLM_NO_SUCH_THING"
    assert "secret-value" not in str(facts)


def test_it_prints_one_fact_a_line(capsys):
    assert run([]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(collect())
