"""Masked language modelling: some tokens are hidden and have to be told."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from axcore.data._order import indexed_hashes
from axcore.data._packing import Batch
from axcore.data._tokenizers import BaseTokenizer
from axcore.data._transform import BaseTransform, BoundTransform
from axcore.errors import DataError

__all__ = ["MaskedTokens"]


class MaskedTokens(BaseTransform):
    """Chooses tokens, hides most of them, and makes them the targets.

    Of each row a share of ``rate`` (at least one token) is chosen, never padding nor the tokens
    that open and close documents. A chosen token becomes the mask token, a random one, or stays,
    each with its probability; the model is to tell what it was.

    The batch has ``input_ids``, ``target_ids`` (the tokens as they were), ``target_mask`` (the
    chosen ones), ``segment_ids`` and ``positions``, as ``axcore.layers.EncoderModel`` takes them.

    References:
        Devlin et al., BERT, arXiv:1810.04805, section 3.1 and appendix A.1.
    """

    class Config(BaseTransform.Config):
        """The defaults are BERT's."""

        # Share of a row's tokens that are chosen.
        rate: float = 0.15
        # Of the chosen ones: how many become the mask token, and how many a random token.
        mask_share: float = 0.8
        random_share: float = 0.1
        # Its text, which the tokenizer must know as one token, or its id.
        mask_token: str | int = "[MASK]"

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        shares = (cfg.mask_share, cfg.random_share)
        if not 0 < cfg.rate < 1 or min(shares) < 0 or sum(shares) > 1 + 1e-9:
            raise DataError(
                f"got rate={cfg.rate}, mask_share={cfg.mask_share}, random_share="
                f"{cfg.random_share}, expected a rate between 0 and 1 and shares of 1 at most",
                code="AX550",
                hint="what remains of the shares is left as it is: 0.8 and 0.1 leave 0.1",
            )

    def packed_len(self, seq_len: int) -> int:
        """Returns ``seq_len``: no token is added or taken away."""
        return seq_len

    def bind(self, tokenizer: BaseTokenizer, seq_len: int) -> BoundTransform:
        """See :meth:`BaseTransform.bind`."""
        del seq_len
        special = [
            i for i in (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) if i is not None
        ]
        mask_id = _id_of(self.cfg.mask_token, tokenizer)
        return functools.partial(
            self._apply, special=np.array(special), mask_id=mask_id, num_ids=tokenizer.vocab_size
        )

    def _apply(
        self, batch: Batch, keys: Sequence[str], *, special: np.ndarray, mask_id: int, num_ids: int
    ) -> Batch:
        tokens = batch["input_ids"]
        hidden = tokens.copy()
        chosen = np.zeros(tokens.shape, dtype=bool)
        eligible = (batch["segment_ids"] != 0) & ~np.isin(tokens, special)
        for row, key in enumerate(keys):
            places = np.flatnonzero(eligible[row])
            count = max(1, round(len(places) * self.cfg.rate)) if len(places) else 0
            order = np.argsort(indexed_hashes(f"{key}\x1fwhich", len(places)), kind="stable")
            picked = places[order[:count]]
            chosen[row, picked] = True
            # A real number in [0, 1) for each, of 53 bits.
            dice = (indexed_hashes(f"{key}\x1fhow", count) >> np.uint64(11)) * 2.0**-53
            other = indexed_hashes(f"{key}\x1fother", count) % np.uint64(num_ids)
            is_random = (dice >= self.cfg.mask_share) & (
                dice < self.cfg.mask_share + self.cfg.random_share
            )
            hidden[row, picked[dice < self.cfg.mask_share]] = mask_id
            hidden[row, picked[is_random]] = other[is_random].astype(np.int32)
        return {
            "input_ids": hidden,
            "target_ids": tokens,
            "target_mask": chosen,
            "segment_ids": batch["segment_ids"],
            "positions": batch["positions"],
        }


def _id_of(token: str | int, tokenizer: BaseTokenizer) -> int:
    if isinstance(token, int):
        if not 0 <= token < tokenizer.vocab_size:
            raise DataError(
                f"the mask token's id {token} is not one of the tokenizer's {tokenizer.vocab_size}",
                code="AX551",
                where="input.transform.mask_token",
            )
        return token
    ids = tokenizer.encode_markup(token)
    if len(ids) != 1:
        raise DataError(
            f"the tokenizer ({type(tokenizer).__name__}) makes {len(ids)} tokens of the mask token "
            f"{token!r}, expected one",
            code="AX551",
            where="input.transform.mask_token",
            hint="set input.tokenizer to the model's own, or input.transform.mask_token to an id "
            "that text never has",
        )
    return int(ids[0])
