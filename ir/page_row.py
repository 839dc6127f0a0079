"""Which of a request's pages belongs to which head group: a closed form, so that nobody has to store it.

A serving engine knows a request's pages as one row, in the order in which they were claimed. Here is that order, for a prompt of P
tokens (`kept_g` of which group g keeps) and d = n - P decoded ones, with t_g tokens a page, and m_g = ceil(kept_g / t_g):

    first, group after group, the m_g pages of the compressed prompt;
    then, step by step and inside a step group after group, the page of every group whose last one is full.

After x decode steps group g has been given `added_g(x) = ceil(max(0, x - slack_g) / t_g)` pages, slack_g = m_g t_g - kept_g being
the room in its last one. So its page number m_g + i comes at step `d = slack_g + i t_g + 1`, and before it in the row are all m, and
`added_h(d)` pages of groups h < g and `added_h(d - 1)` of the others. The generated page-table kernel computes just that.
"""

from typing import NamedTuple

from .page_law import pages
from .plan import Plan


def group_pages_in_row(plan: Plan, prompt_tokens: int, num_tokens: int) -> list[list[int]]:
    """For every group, where in the request's row its pages stand; all pages of the prompt are claimed from its first chunk on.

    Args:
        plan: gives laws and page geometry.
        prompt_tokens: tokens of the prompt, P.
        num_tokens: tokens of prompt and answer so far, n; below P, all pages of the prompt are there already.
    """
    places: list[list[int]] = []
    added: list[tuple[int, int]] = []  # (decode step, group) of every page after the prompt's
    num_pages = 0
    for group_id, group in enumerate(plan.grouping.groups):
        tokens_per_page = plan.layout.tokens_per_page(group.num_members)
        kept = plan.group_tokens(group_id, prompt_tokens, prompt_tokens)
        first = pages(kept, tokens_per_page)
        places.append(list(range(num_pages, num_pages + first)))
        num_pages += first
        slack = first * tokens_per_page - kept
        added += [(step, group_id) for step in range(slack + 1, num_tokens - prompt_tokens + 1, tokens_per_page)]
    for place, (_, group_id) in enumerate(sorted(added), start=num_pages):
        places[group_id].append(place)
    return places


def most_pages(plan: Plan, max_tokens: int) -> int:
    """Pages of the request that needs most, of those with at most so many tokens in all and an answer that the plan admits.

    `held(P, P + max_new_tokens)` rises with P, and `held(P, max_tokens)` does not, because of one more prompt token at most one is
    kept: the most is held where the longest answer just fits.
    """
    prompt_tokens = max(1, max_tokens - plan.max_new_tokens)
    return plan.num_pages(prompt_tokens, max(prompt_tokens, max_tokens))


class Reservation(NamedTuple):
    """What a request holds on each rank."""

    num_pages: int
    max_tokens: int  # of prompt and answer, until it needs another page


def reserve(plan: Plan, prompt_tokens: int, num_tokens: int) -> Reservation:
    """The pages of a request of which so many tokens are scheduled: the whole prompt's from its first chunk on."""
    num_tokens = max(prompt_tokens, num_tokens)
    num_pages, room = 0, []
    for group_id, group in enumerate(plan.grouping.groups):
        tokens_per_page = plan.layout.tokens_per_page(group.num_members)
        held = plan.group_tokens(group_id, prompt_tokens, num_tokens)
        group_pages = pages(held, tokens_per_page)
        num_pages += group_pages
        room.append(group_pages * tokens_per_page - held)
    return Reservation(num_pages, num_tokens + min(room))
