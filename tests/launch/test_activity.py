"""What a command says while it has nothing to show yet, and the text of `ask` while it grows."""

import io
import time

from rich.console import Console

from memsearcher_jax.launch import ask
from memsearcher_jax.logs.progress import announced
from memsearcher_jax.runs.run_dir import located


def test_what_takes_long_is_repeated_with_its_age(capsys):
    with announced(every_s=0.1) as begin:
        begin("loading")
        time.sleep(0.3)
        begin("compiling")
        time.sleep(1.3)
    assert {"loading", "compiling", "compiling … 1 s"} <= {*capsys.readouterr().err.splitlines()}
    with announced() as begin:
        begin("loading")
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_a_reply_while_it_grows(monkeypatch, on_one_device):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80, highlight=False)
    monkeypatch.setattr(ask, "Console", lambda **settings: console)
    ask.main(["--config", "tiny", "--checkpoint", str(located("package:tiny")), "Where was Ada Kern born?"])
    growing = screen.getvalue().partition("think\n")[0]
    assert "\x1b[?25l" in growing, "the cursor is hidden while the text grows"
    assert growing.count("\x1b[2K") > 3, "lines are drawn again"
