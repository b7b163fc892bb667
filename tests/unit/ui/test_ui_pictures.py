"""A plot is worth a warning, never a run."""

import sys
import threading
import time
import types

from tasks.ui import task as ui


def test_a_plot_that_fails_is_left_out():
    before = ui.failures()
    assert ui.drawn(lambda: 1 / 0) == b""
    assert ui.failures() == before + 1


def test_pandas_is_whole_before_anything_is_drawn(tmp_path, monkeypatch):
    (tmp_path / "pandas.py").write_text("import time\ntime.sleep(0.5)\nTimestamp = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "pandas"]:
        monkeypatch.delitem(sys.modules, name)
    importing = threading.Thread(target=__import__, args=("pandas",))
    importing.start()
    while "pandas" not in sys.modules:
        time.sleep(0.001)
    assert not hasattr(sys.modules["pandas"], "Timestamp")
    assert ui.drawn(lambda: sys.modules["pandas"].Timestamp.to_bytes(1)) == b"\x01"
    importing.join()
    monkeypatch.setitem(sys.modules, "pandas", types.ModuleType("pandas"))
