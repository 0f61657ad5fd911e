//! Statistics of a list of seconds.

/// The value below which `share` of the sorted values lie, interpolated between its neighbours.
///
/// # Panics
/// If there are no values.
pub fn quantile(sorted: &[f64], share: f64) -> f64 {
    let position = share * (sorted.len() - 1) as f64;
    let (below, above) = (sorted[position.floor() as usize], sorted[position.ceil() as usize]);
    below + (above - below) * position.fract()
}

/// The values, the smallest first.
pub fn sorted(values: impl IntoIterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values
}

/// The mean; 0 if there are no values.
pub fn mean(values: impl IntoIterator<Item = f64>) -> f64 {
    let (sum, count) = values.into_iter().fold((0.0, 0.0), |(sum, count), value| (sum + value, count + 1.0));
    if count == 0.0 { 0.0 } else { sum / count }
}

/// GB/s of an allreduce of `bytes` per rank, as nccl-tests defines them. `algbw` is bytes by time. `busbw`
/// corrects it by what each link of an ideal ring would carry, so that different numbers of ranks can be
/// compared.
pub(super) fn bandwidths(bytes: u64, seconds: f64, workers: u32) -> (f64, f64) {
    let algbw = bytes as f64 / seconds / 1e9;
    let workers = f64::from(workers);
    (algbw, algbw * 2.0 * (workers - 1.0) / workers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_lie_between_their_neighbours() {
        let values = sorted([4.0, 1.0, 3.0, 2.0]);
        assert_eq!(values, [1.0, 2.0, 3.0, 4.0]);
        assert_eq!(quantile(&values, 0.5), 2.5);
        assert_eq!((quantile(&values, 0.0), quantile(&values, 1.0)), (1.0, 4.0));
        assert!((quantile(&values, 0.1) - 1.3).abs() < 1e-12);
        assert!((quantile(&values, 0.9) - 3.7).abs() < 1e-12);
        assert_eq!(quantile(&[7.0], 0.9), 7.0);
    }

    #[test]
    fn means_of_nothing_are_nothing() {
        assert_eq!((mean([]), mean([1.0, 2.0, 6.0])), (0.0, 3.0));
    }

    #[test]
    fn bandwidths_are_those_of_nccl_tests() {
        assert_eq!(bandwidths(2_000_000_000, 0.5, 4), (4.0, 6.0));
        assert_eq!(bandwidths(2_000_000_000, 0.5, 2), (4.0, 4.0));
        assert_eq!(bandwidths(2_000_000_000, 0.5, 1), (4.0, 0.0));
    }
}
