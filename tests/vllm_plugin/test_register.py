import os
import subprocess
import sys

import pytest

from tests.engine_runs import ENVIRONMENT, ROOT

TWICE = """
from tangram_plan.runtime.vllm_plugin import register

register()
register()

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from tangram_plan.runtime.vllm_plugin.manager import PageManager
from tangram_plan.runtime.vllm_plugin.spec import PageSpec

managers = {PageSpec: PageManager, FullAttentionSpec: FullAttentionManager, SlidingWindowSpec: SlidingWindowManager}
for spec, manager in managers.items():
    assert KVCacheSpecRegistry.get_manager_class(object.__new__(spec)) is manager
"""


@pytest.mark.slow
def test_registering_twice_is_harmless_and_vllm_keeps_its_own_managers() -> None:
    environment = os.environ | ENVIRONMENT
    subprocess.run([sys.executable, "-c", TWICE], cwd=ROOT, env=environment, check=True, capture_output=True)
