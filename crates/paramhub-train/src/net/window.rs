/// A square window that slides over an image: the geometry of convolution and pooling.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window {
    /// Extents of the input.
    pub(super) height: usize,
    pub(super) width: usize,
    pub(super) channels: usize,
    /// Side of the window.
    pub(super) side: usize,
    pub(super) stride: usize,
    /// Zeros around the input for a convolution; pooling ignores them.
    pub(super) padding: usize,
    /// `true` if a last window that sticks out counts (as in Caffe's pooling) or not (as in a convolution).
    pub(super) partial: bool,
}

impl Window {
    /// Rows and columns of the output; `None` if not a single window fits.
    pub(super) fn output(&self) -> Option<(usize, usize)> {
        Some((self.positions(self.height)?, self.positions(self.width)?))
    }

    fn positions(&self, extent: usize) -> Option<usize> {
        let slack = (extent + 2 * self.padding).checked_sub(self.side);
        match (slack, self.partial) {
            (Some(slack), false) => Some(slack / self.stride + 1),
            (Some(slack), true) => Some(slack.div_ceil(self.stride) + 1),
            (None, true) if extent > 0 => Some(1),
            (None, _) => None,
        }
    }

    /// Values per input image.
    pub(super) fn features(&self) -> usize {
        self.height * self.width * self.channels
    }

    /// The part of the input under the window at output position `at`, along an axis of this extent.
    pub(super) fn span(&self, at: usize, extent: usize) -> std::ops::Range<usize> {
        let start = (at * self.stride).saturating_sub(self.padding);
        let end = (at * self.stride + self.side).saturating_sub(self.padding).min(extent);
        start.min(end)..end
    }
}
