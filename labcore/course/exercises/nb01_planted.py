"""The planted defect of a bug hunt. Built in notebook 01."""

from __future__ import annotations

import torch

from labcore.baseline.naive import ContiguousCache, OutOfSlots, Region


class CarelessCache(ContiguousCache):
    """A contiguous cache with a defect that real engines have had."""

    def extend(
        self, layer: int, region: Region, num_stored: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first, stop = region.start + num_stored, region.start + num_stored + k.shape[1]
        if first > region.stop:
            raise OutOfSlots(f"{num_stored} tokens are in a region of {region.size} slots: reserve more.")
        self.k[layer][first:stop] = k.transpose(0, 1)
        self.v[layer][first:stop] = v.transpose(0, 1)
        return (
            self.k[layer][region.start : stop].transpose(0, 1),
            self.v[layer][region.start : stop].transpose(0, 1),
        )
