from launch import torchrun, uses_torchrun


@uses_torchrun
def test_two_processes_report_what_one_does():
    """Data parallel, FSDP2 and tensor parallel; one collective call per report."""
    output = torchrun("monitored.py", num_processes=2)
    assert output.count("e-0") + output.count("0.00e+00") == 5, output
