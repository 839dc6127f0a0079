"""What a plan IS: frozen values, the page law, what makes them valid, their text and the manifest. Imports nothing of ours."""

from .artefact_names import (
    ALLOCATOR_FILE,
    HEAD_TABLES_NAME,
    KERNELS_FOLDER,
    PAGE_TABLE_KERNEL,
    EvictionRole,
    decode_kernel_name,
    eviction_kernel_name,
    gather_kernel_name,
    plan_kernel_name,
    prefill_kernel_name,
)
from .boundaries import longest_chunk, next_boundary
from .budget_table import BudgetTable
from .cta_partition import CtaPartition, Schedule, ScheduleChoice, ScheduleEstimate, StaticSplits
from .errors import CheckFailedError, MismatchError, TangramError, VerifyError
from .head_grouping import HeadGroup, HeadGrouping
from .head_order import HEAD_ORDER_KEY, ORIGINAL_ORDER, HeadOrder, check_head_order
from .manifest import MANIFEST, REPORTS, Manifest, artefact_strangers, load_artefact, seal_artefact
from .memory_use import REPORT_CONTEXTS, MemoryUse, memory_use
from .model_shape import AttentionForm, KVHead, LayerKind, LayerShape, ModelShape
from .page_law import PAGE_TOKEN_ALIGNMENT, RHO_ONE, RetentionLaw, pages, tokens_per_page
from .page_layout import KVDtype, PageLayout
from .page_row import Reservation, group_pages_in_row, most_pages, reserve
from .paths import user_path
from .plan import KEEP_EVERYTHING, Plan, Provenance
from .scorer_statistics import (
    MEAN_KEYS,
    SCORER_STATISTICS,
    STATISTICS_FILE,
    check_scorer,
    missing_statistics,
    needed_statistics,
    verify_statistics,
)
from .text import parse_plan, plan_hash, print_json, print_plan
from .verify import (
    verify_budgets,
    verify_grouping,
    verify_head_order,
    verify_layout,
    verify_model_shape,
    verify_partition,
    verify_plan,
    verify_saves_memory,
)

__all__ = [
    "ALLOCATOR_FILE",
    "HEAD_ORDER_KEY",
    "HEAD_TABLES_NAME",
    "KEEP_EVERYTHING",
    "KERNELS_FOLDER",
    "MANIFEST",
    "MEAN_KEYS",
    "ORIGINAL_ORDER",
    "PAGE_TABLE_KERNEL",
    "PAGE_TOKEN_ALIGNMENT",
    "REPORTS",
    "REPORT_CONTEXTS",
    "RHO_ONE",
    "SCORER_STATISTICS",
    "STATISTICS_FILE",
    "AttentionForm",
    "BudgetTable",
    "CheckFailedError",
    "CtaPartition",
    "EvictionRole",
    "HeadGroup",
    "HeadGrouping",
    "HeadOrder",
    "KVDtype",
    "KVHead",
    "LayerKind",
    "LayerShape",
    "Manifest",
    "MemoryUse",
    "MismatchError",
    "ModelShape",
    "PageLayout",
    "Plan",
    "Provenance",
    "Reservation",
    "RetentionLaw",
    "Schedule",
    "ScheduleChoice",
    "ScheduleEstimate",
    "StaticSplits",
    "TangramError",
    "VerifyError",
    "artefact_strangers",
    "check_head_order",
    "check_scorer",
    "decode_kernel_name",
    "eviction_kernel_name",
    "gather_kernel_name",
    "group_pages_in_row",
    "load_artefact",
    "longest_chunk",
    "memory_use",
    "missing_statistics",
    "most_pages",
    "needed_statistics",
    "next_boundary",
    "pages",
    "parse_plan",
    "plan_hash",
    "plan_kernel_name",
    "prefill_kernel_name",
    "print_json",
    "print_plan",
    "reserve",
    "seal_artefact",
    "tokens_per_page",
    "user_path",
    "verify_budgets",
    "verify_grouping",
    "verify_head_order",
    "verify_layout",
    "verify_model_shape",
    "verify_partition",
    "verify_plan",
    "verify_saves_memory",
    "verify_statistics",
]
