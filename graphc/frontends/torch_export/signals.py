"""``torch.istft`` in another form: PyTorch's own adds up frames by an operator that becomes thousands of nodes."""

from __future__ import annotations

import torch
from torch.nn.functional import fold, pad


def istft(
    input: torch.Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: torch.Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> torch.Tensor | None:
    """Frames of the inverse transform times the window, added where they overlap, over the sum of the squared windows.

    Returns:
        The signal; None for what PyTorch must compute or refuse itself: complex signals, and inputs of other ranks.
    """
    if return_complex or onesided is False or input.dim() not in (2, 3) or not input.is_complex():
        return None
    hop, size = hop_length or n_fft // 4, win_length or n_fft
    if window is None:
        window = torch.ones(size, dtype=input.real.dtype, device=input.device)
    if window.shape != (size,) or size > n_fft or input.shape[-2] != n_fft // 2 + 1:
        return None
    window = pad(window, ((n_fft - size) // 2, n_fft - size - (n_fft - size) // 2))
    frames = torch.fft.irfft(input.transpose(-1, -2), n=n_fft, norm="ortho" if normalized else "backward") * window
    count = frames.shape[-2]
    whole = n_fft + hop * (count - 1)

    def added(parts: torch.Tensor) -> torch.Tensor:
        return fold(parts.transpose(-1, -2), (1, whole), (1, n_fft), stride=(1, hop)).flatten(-3)

    start = n_fft // 2 if center else 0
    end = whole - start if length is None else start + length
    weight = added((window * window).expand(1, count, n_fft))[..., start:end]
    signal = added(frames if input.dim() == 3 else frames.unsqueeze(0))[..., start:end] / weight
    if length is not None and end > whole:
        signal = pad(signal, (0, end - whole))
    return signal if input.dim() == 3 else signal.squeeze(0)


FORMS = {torch.istft: istft, torch.Tensor.istft: istft}
