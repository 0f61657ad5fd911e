/// Softmax cross-entropy, the mean over the rows of `logits` (one row of classes per label). The gradient
/// replaces `logits`.
pub(super) fn softmax_cross_entropy(logits: &mut [f32], labels: &[u8]) -> f64 {
    let classes = logits.len() / labels.len();
    let scale = 1.0 / labels.len() as f32;
    let mut loss = 0.0;
    for (row, &label) in logits.chunks_exact_mut(classes).zip(labels) {
        let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let chosen = row[usize::from(label)] - largest;
        let mut sum = 0.0;
        for value in row.iter_mut() {
            *value = (*value - largest).exp();
            sum += *value;
        }
        loss += f64::from(sum.ln() - chosen);
        row.iter_mut().for_each(|value| *value *= scale / sum);
        row[usize::from(label)] -= scale;
    }
    loss / labels.len() as f64
}

/// The number of rows whose largest value is at their label.
pub(super) fn correct(logits: &[f32], labels: &[u8]) -> usize {
    let classes = logits.len() / labels.len();
    let predicted = logits
        .chunks_exact(classes)
        .map(|row| (1..classes).fold(0, |best, class| if row[class] > row[best] { class } else { best }));
    predicted.zip(labels).filter(|&(predicted, &label)| predicted == usize::from(label)).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equals_hand_computed_values_and_survives_large_logits() {
        let mut logits = [0.0, 0.0, 1000.0, 0.0];
        let loss = softmax_cross_entropy(&mut logits, &[0, 0]);
        assert!((loss - std::f64::consts::LN_2 / 2.0).abs() < 1e-7, "{loss}");
        assert_eq!(logits, [-0.25, 0.25, 0.0, 0.0]);
    }

    #[test]
    fn counts_the_first_of_equal_maxima() {
        assert_eq!(correct(&[1.0, 1.0, 0.0, 2.0], &[0, 1]), 2);
        assert_eq!(correct(&[1.0, 1.0, 0.0, 2.0], &[1, 0]), 0);
    }
}
