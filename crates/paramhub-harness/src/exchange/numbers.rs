//! Gradients whose sums are known, and the parameters that the hub must compute from them.
//!
//! Gradients and initial parameters are eighths between -1 and 7/8. These are exact in every dtype, and so is
//! the sum of any number of ranks in any order. The optimizer's update is repeated with the optimizer's own
//! kernel.

use anyhow::bail;
use paramhub::settings::Settings;
use paramhub::{Codec, Dtype, Key, Registry};
use paramhub_kernels::{Step, convert, quantise};
use serde::{Deserialize, Serialize};

use super::spec::{Spec, Transport};

const BLOCK_ELEMENTS: usize = 8192;
/// The number of no rank, for the initial parameters.
pub(super) const START: u32 = u32::MAX;

/// The result of the comparison of all parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// The largest difference; [`f64::MAX`] if a parameter is a NaN.
    pub max_abs_error: f64,
    /// Elements whose bits are not those expected.
    pub wrong: u64,
}

impl Verdict {
    /// Both comparisons together.
    pub fn and(self, other: Verdict) -> Verdict {
        Verdict {
            max_abs_error: self.max_abs_error.max(other.max_abs_error),
            wrong: self.wrong + other.wrong,
        }
    }

    /// # Errors
    /// If anything is wrong.
    pub fn require_right(&self) -> anyhow::Result<()> {
        match self.wrong {
            0 => Ok(()),
            wrong => bail!(
                "the exchange is wrong: {wrong} parameters of all workers together differ from what the kernels make of \
                 the same gradients, by up to {}",
                self.max_abs_error
            ),
        }
    }
}

/// The number of a rank at a position of a tensor: an eighth between -1 and 7/8.
pub fn small(rank: u32, of: usize, position: usize) -> f32 {
    let mixed = (rank as usize)
        .wrapping_mul(31)
        .wrapping_add(of.wrapping_mul(17))
        .wrapping_add(position.wrapping_mul(7));
    (mixed % 16) as f32 / 8.0 - 1.0
}

/// Writes every tensor's gradient of a rank, or with [`START`] the initial parameters.
pub(super) fn fill(rank: u32, keys: &[Key], tensors: Vec<&mut [u8]>) {
    let mut values = vec![0.0; BLOCK_ELEMENTS];
    for ((number, key), tensor) in (0..).zip(keys).zip(tensors) {
        let codec = key.dtype.codec();
        for (first, wire) in blocks(tensor.chunks_mut(BLOCK_ELEMENTS * codec.bytes())) {
            let values = &mut values[..wire.len() / codec.bytes()];
            contribute(rank, number, first, values);
            convert::encode(values, wire, codec);
        }
    }
}

/// Compares parameters with the expected ones after `exchanges` exchanges of the same gradients.
pub(super) fn check(spec: &Spec, exchanges: u64, tensors: &[&[u8]]) -> anyhow::Result<Verdict> {
    let registry = Registry::with_builtins();
    let settings = spec.settings()?;
    let (aggregator, optimizer) =
        (registry.aggregator(&settings.aggregator)?, registry.optimizer(&settings.optimizer.name)?);
    let hyperparameters = settings.optimizer.hyperparameters.unwrap_or_else(|| optimizer.defaults());
    // Each block of a chunk has levels of its own.
    let chunk_elements = settings.chunk_bytes as usize / Codec::F32.bytes();
    let most = BLOCK_ELEMENTS.max(if settings.quantises() { chunk_elements } else { 0 });
    let mut state = vec![0.0; optimizer.state_slots(&hyperparameters) * most];
    let state_slots = state.len() / most;
    let [mut values, mut sum, mut model] = [(); 3].map(|()| vec![0.0_f32; most]);
    let mut wire = vec![0_u8; most * Codec::F32.bytes()];
    let mut quantised = Quantised::new(&settings, spec.workers as usize, most);
    let mut verdict = Verdict::default();
    for ((number, key), tensor) in (0..).zip(spec.keys.keys()).zip(tensors) {
        let (memory, codec) = (key.dtype.codec(), settings.codec_of(key));
        // Through shared memory quantised keys go in their own type.
        let is_shared = spec.transport != Transport::Tcp;
        let travels_as = if is_shared && codec.is_quantised() { memory } else { codec };
        let block_elements = if codec.is_quantised() { chunk_elements } else { BLOCK_ELEMENTS };
        for (first, received) in
            (0..).step_by(block_elements).zip(tensor.chunks(block_elements * memory.bytes()))
        {
            let length = received.len() / memory.bytes();
            let (values, sum, model) = (&mut values[..length], &mut sum[..length], &mut model[..length]);
            let state = &mut state[..state_slots * length];
            contribute(START, number, first, model);
            state.fill(0.0);
            quantised.begin(model);
            for exchange in 1..=exchanges {
                // The sum is the same in every exchange, unless the quantisation's losses are added.
                for rank in 0..if exchange == 1 || codec.is_quantised() { spec.workers } else { 0 } {
                    let wire = &mut wire[..travels_as.payload_bytes(length)];
                    contribute(rank, number, first, values);
                    match travels_as.is_quantised() {
                        true => quantise::encode(values, quantised.lost_by(rank, length), wire, codec),
                        false => convert::encode(values, wire, travels_as),
                    }
                    match rank {
                        0 => aggregator.assign(sum, wire, travels_as),
                        _ => aggregator.add(sum, wire, travels_as),
                    }
                }
                let (number, contributions) = (exchange, spec.workers);
                let step = Step {
                    hyperparameters: &hyperparameters,
                    number,
                    contributions,
                    factor: 1.0,
                    tensor: None,
                };
                optimizer.apply(&step, model, sum, state);
                if codec.is_quantised() {
                    quantised.answer(model, &mut wire[..codec.payload_bytes(length)], codec);
                }
            }
            let had = if codec.is_quantised() { &quantised.had[..length] } else { model };
            let wire = &mut wire[..received.len()];
            convert::encode(had, wire, memory);
            verdict = verdict.and(compare(wire, received, key.dtype));
        }
    }
    Ok(verdict)
}

/// The state that workers and hub keep for one chunk of a quantised key.
struct Quantised {
    /// The losses of every rank, one rank after the other.
    lost: Vec<f32>,
    lost_by_hub: Vec<f32>,
    /// The parameters that the ranks have.
    had: Vec<f32>,
    has_parameters: bool,
}

impl Quantised {
    fn new(settings: &Settings, workers: usize, elements: usize) -> Quantised {
        let elements = if settings.quantises() { elements } else { 0 };
        let [lost_by_hub, had] = [(); 2].map(|()| vec![0.0; elements]);
        let lost = vec![0.0; elements * workers];
        Quantised { lost, lost_by_hub, had, has_parameters: settings.has_parameters() }
    }

    fn begin(&mut self, model: &[f32]) {
        self.lost.fill(0.0);
        self.lost_by_hub.fill(0.0);
        self.had.iter_mut().zip(model).for_each(|(had, begun)| *had = *begun);
    }

    fn lost_by(&mut self, rank: u32, elements: usize) -> &mut [f32] {
        &mut self.lost[rank as usize * elements..][..elements]
    }

    fn answer(&mut self, model: &[f32], wire: &mut [u8], codec: Codec) {
        let had = &mut self.had[..model.len()];
        if self.has_parameters {
            return quantise::encode_change(model, had, wire, codec);
        }
        quantise::encode(model, &mut self.lost_by_hub[..model.len()], wire, codec);
        convert::decode(wire, had, codec);
    }
}

fn compare(expected: &[u8], received: &[u8], dtype: Dtype) -> Verdict {
    let mut verdict = Verdict::default();
    if expected == received {
        return verdict;
    }
    let bytes = dtype.bytes();
    for (expected, received) in expected.chunks(bytes).zip(received.chunks(bytes)) {
        if expected == received {
            continue;
        }
        let number = |wire: &[u8]| {
            let mut value = [0.0_f32];
            convert::decode(wire, &mut value, dtype.codec());
            f64::from(value[0])
        };
        let error = (number(expected) - number(received)).abs();
        let max_abs_error = if error.is_finite() { error } else { f64::MAX };
        verdict = verdict.and(Verdict { max_abs_error, wrong: 1 });
    }
    verdict
}

/// Blocks of a tensor, each with the number of its first element.
fn blocks<B>(blocks: impl Iterator<Item = B>) -> impl Iterator<Item = (u64, B)> {
    (0..).step_by(BLOCK_ELEMENTS).zip(blocks)
}

/// The elements of a rank's gradient from `first` on. They differ for every rank, key and position, so that
/// none can be mistaken for another.
fn contribute(rank: u32, key: u32, first: u64, values: &mut [f32]) {
    const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
    let mut mixed = (u64::from(rank) << 32 | u64::from(key)).wrapping_add(GOLDEN);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    for (value, element) in values.iter_mut().zip(first..) {
        let sixteenth = mixed.wrapping_add(element.wrapping_mul(GOLDEN)) >> 60;
        *value = (sixteenth as i32 - 8) as f32 / 8.0;
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use paramhub::KeyTable;

    use super::*;
    use crate::exchange::spec::Optimizer;

    /// A key's elements. The key table has bounded their number.
    fn elements(key: &Key) -> usize {
        key.elements().expect("a table bounds its keys") as usize
    }

    /// The positions of the tensors in a buffer that holds them all.
    struct Layout {
        tensors: Vec<Range<usize>>,
        bytes: usize,
    }

    impl Layout {
        fn new(keys: &[Key]) -> Layout {
            let mut end = 0_usize;
            let tensors = keys.iter().map(|key| {
                let start = end.next_multiple_of(64);
                end = start + elements(key) * key.dtype.bytes();
                start..end
            });
            let tensors = tensors.collect();
            Layout { tensors, bytes: end }
        }

        fn slices<'a>(&self, buffer: &'a [u8]) -> Vec<&'a [u8]> {
            self.tensors.iter().map(|tensor| &buffer[tensor.clone()]).collect()
        }

        fn slices_mut<'a>(&self, buffer: &'a mut [u8]) -> Vec<&'a mut [u8]> {
            let (mut rest, mut at) = (buffer, 0);
            let tensors = self.tensors.iter().map(|tensor| {
                let (slice, tail) = std::mem::take(&mut rest)[tensor.start - at..].split_at_mut(tensor.len());
                (rest, at) = (tail, tensor.end);
                slice
            });
            tensors.collect()
        }
    }

    fn spec(optimizer: Optimizer, dtype: Dtype) -> Spec {
        let keys = [7, 8200, 1].iter().enumerate();
        let keys = keys.map(|(i, &n)| Key { dtype, ..Key::new(format!("k{i}"), [n]) }).collect();
        Spec { optimizer, chunk_bytes: 1024, ..Spec::new(KeyTable::new(keys).unwrap(), 3, 1) }
    }

    #[test]
    fn slices_are_the_tensors_whichever_way_they_are_cut() {
        let spec = spec(Optimizer::Mean, Dtype::F32);
        let layout = Layout::new(spec.keys.keys());
        let mut buffer = vec![0; layout.bytes];
        fill(1, spec.keys.keys(), layout.slices_mut(&mut buffer));
        let lengths: Vec<_> = layout.slices(&buffer).iter().map(|slice| slice.len()).collect();
        assert_eq!(lengths, [28, 32_800, 4]);
        let mut value = [0.0];
        contribute(1, 1, 8199, &mut value);
        assert_eq!(layout.slices(&buffer)[1][4 * 8199..], value[0].to_le_bytes());
    }

    #[test]
    fn the_mean_of_three_ranks_is_found_right_and_a_flipped_bit_wrong() {
        for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16] {
            let spec = spec(Optimizer::Mean, dtype);
            let layout = Layout::new(spec.keys.keys());
            let mut buffer = vec![0; layout.bytes];
            for ((number, key), tensor) in (0..).zip(spec.keys.keys()).zip(layout.slices_mut(&mut buffer)) {
                for element in 0..elements(key) {
                    let of = |rank| {
                        let mut value = [0.0];
                        contribute(rank, number, element as u64, &mut value);
                        value[0]
                    };
                    let mean = [(of(0) + of(1) + of(2)) * (1.0 / 3.0_f32)];
                    let at = element * dtype.bytes();
                    convert::encode(&mean, &mut tensor[at..at + dtype.bytes()], dtype.codec());
                }
            }
            assert_eq!(check(&spec, 5, &layout.slices(&buffer)).unwrap(), Verdict::default(), "{dtype}");
            *layout.slices_mut(&mut buffer)[1].last_mut().unwrap() ^= 0x80;
            let wrong = check(&spec, 5, &layout.slices(&buffer)).unwrap();
            assert_eq!(wrong.wrong, 1);
            assert!(wrong.max_abs_error > 0.0 && wrong.max_abs_error < 2.0, "{wrong:?}");
        }
    }

    #[test]
    fn every_optimizer_moves_on_with_every_exchange() {
        for optimizer in [Optimizer::Sgd, Optimizer::Nesterov, Optimizer::Adam] {
            let spec = spec(optimizer, Dtype::F32);
            let layout = Layout::new(spec.keys.keys());
            let mut start = vec![0; layout.bytes];
            fill(START, spec.keys.keys(), layout.slices_mut(&mut start));
            let verdict = |exchanges| check(&spec, exchanges, &layout.slices(&start)).unwrap();
            assert_eq!(verdict(0).wrong, 0);
            let (one, five) = (verdict(1), verdict(5));
            assert!(one.wrong > 7000 && five.max_abs_error > one.max_abs_error, "{one:?} {five:?}");
        }
    }

    #[test]
    fn a_nan_counts_as_the_largest_error() {
        let verdict = compare(&1.0_f32.to_le_bytes(), &f32::NAN.to_le_bytes(), Dtype::F32);
        assert_eq!(verdict, Verdict { max_abs_error: f64::MAX, wrong: 1 });
    }
}
