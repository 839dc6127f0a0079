"""What a plan IS: frozen values, the page law, what makes them valid, their text and the manifest. Imports nothing of ours."""

from .budget_table import BudgetTable
from .cta_partition import CtaPartition, Schedule, ScheduleChoice, ScheduleEstimate, StaticSplits
from .errors import MismatchError, TangramError, VerifyError
from .head_grouping import HeadGroup, HeadGrouping
from .head_order import ORIGINAL_ORDER, HeadOrder
from .model_shape import KVHead, LayerKind, LayerShape, ModelShape
from .page_law import PAGE_TOKEN_ALIGNMENT, RHO_ONE, RetentionLaw, pages, tokens_per_page
from .page_layout import KVDtype, PageLayout
from .plan import Plan, Provenance

__all__ = [
    "ORIGINAL_ORDER",
    "PAGE_TOKEN_ALIGNMENT",
    "RHO_ONE",
    "BudgetTable",
    "CtaPartition",
    "HeadGroup",
    "HeadGrouping",
    "HeadOrder",
    "KVDtype",
    "KVHead",
    "LayerKind",
    "LayerShape",
    "MismatchError",
    "ModelShape",
    "PageLayout",
    "Plan",
    "Provenance",
    "RetentionLaw",
    "Schedule",
    "ScheduleChoice",
    "ScheduleEstimate",
    "StaticSplits",
    "TangramError",
    "VerifyError",
    "pages",
    "tokens_per_page",
]
