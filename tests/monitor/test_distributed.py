from launch import torchrun, uses_torchrun


@uses_torchrun
def test_two_processes_report_what_one_does():
    """Data parallel, FSDP2 and tensor parallel; one collective call per report."""
    output = torchrun("monitored.py", num_processes=2)
    assert output.count("e-0") + output.count("0.00e+00") == 5, output


@uses_torchrun
def test_actions_on_two_processes_do_what_they_do_on_one():
    """RollBack, QK-Clip and LocAteR at an alarm, under DDP and FSDP2: weights to 1e-9; what would drift is refused."""
    output = torchrun("acted.py", num_processes=2)
    assert output.count(": holds") == 12 and output.count(": refused") == 4, output


@uses_torchrun
def test_stages_of_a_pipeline_have_layers_of_their_own():
    """Under torch's schedule: numbers over all stages, whichever names these have; context parallelism is refused."""
    output = torchrun("pipelined.py", num_processes=2)
    assert output.count("named globally") == 2 and "context parallelism refused: True" in output
