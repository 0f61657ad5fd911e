use std::fmt;

/// The shape of an image and the number of classes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Geometry {
    /// 1 for grey, 3 for colour.
    pub channels: usize,
    /// The height in pixels.
    pub height: usize,
    /// The width in pixels.
    pub width: usize,
    /// Labels are `0..classes`.
    pub classes: usize,
}

impl Geometry {
    /// Values per image.
    pub fn features(&self) -> usize {
        self.channels * self.height * self.width
    }
}

impl fmt::Display for Geometry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}x{}, {} classes", self.height, self.width, self.channels, self.classes)
    }
}

/// Images with their labels.
///
/// Pixels stay bytes, in row, column, channel order (channels last), and become normalised floats only in a batch.
#[derive(Clone, Debug)]
pub struct Dataset {
    geometry: Geometry,
    pixels: Vec<u8>,
    labels: Vec<u8>,
    /// The normalised float of every byte value, for each channel.
    normalised: Vec<[f32; 256]>,
}

impl Dataset {
    /// Images normalised by their own mean and standard deviation.
    ///
    /// # Panics
    /// If the pixels are not whole images, one per label, or a label is no class: readers have checked that.
    pub(super) fn new(geometry: Geometry, pixels: Vec<u8>, labels: Vec<u8>) -> Self {
        assert_eq!(pixels.len(), labels.len() * geometry.features());
        assert!(labels.iter().all(|&label| usize::from(label) < geometry.classes));
        let normalised =
            (0..geometry.channels).map(|channel| normalisation(&pixels, channel, geometry.channels));
        Dataset { normalised: normalised.collect(), geometry, pixels, labels }
    }

    /// The same images, normalised with the mean and standard deviation of `other`: a test set is normalised
    /// like the training set.
    pub(super) fn normalised_like(mut self, other: &Dataset) -> Self {
        self.normalised.clone_from(&other.normalised);
        self
    }

    /// The shape of the images.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Number of examples.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Returns whether there is no example.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    /// The bytes of one image, in row, column, channel order.
    pub fn pixels(&self, example: usize) -> &[u8] {
        let features = self.geometry.features();
        &self.pixels[example * features..][..features]
    }

    /// The class of one image.
    pub fn label(&self, example: usize) -> u8 {
        self.labels[example]
    }

    /// Gathers a batch: normalised images, `examples.len()` x height x width x channels, and their labels. Both
    /// buffers are cleared first.
    pub fn batch(
        &self,
        examples: impl IntoIterator<Item = usize>,
        images: &mut Vec<f32>,
        labels: &mut Vec<u8>,
    ) {
        images.clear();
        labels.clear();
        for example in examples {
            labels.push(self.label(example));
            match self.normalised.as_slice() {
                [grey] => images.extend(self.pixels(example).iter().map(|&byte| grey[usize::from(byte)])),
                channels => images.extend(
                    self.pixels(example)
                        .iter()
                        .zip(channels.iter().cycle())
                        .map(|(&b, table)| table[usize::from(b)]),
                ),
            }
        }
    }
}

/// (byte - mean) / standard deviation over one channel. The sums are integers, so that the order does not matter.
fn normalisation(pixels: &[u8], channel: usize, channels: usize) -> [f32; 256] {
    let mut histogram = [0u64; 256];
    for &byte in pixels.iter().skip(channel).step_by(channels) {
        histogram[usize::from(byte)] += 1;
    }
    let moment = |power: u32| -> f64 {
        let sum: u64 = (0u64..256).zip(&histogram).map(|(value, &count)| value.pow(power) * count).sum();
        sum as f64 / histogram.iter().sum::<u64>().max(1) as f64
    };
    let (mean, square) = (moment(1), moment(2));
    let deviation = (square - mean * mean).max(0.0).sqrt();
    let scale = if deviation > 0.0 { 1.0 / deviation } else { 1.0 };
    std::array::from_fn(|byte| ((byte as f64 - mean) * scale) as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_normalised_per_channel() {
        let geometry = Geometry { channels: 2, height: 1, width: 2, classes: 3 };
        let data = Dataset::new(geometry, vec![0, 7, 10, 7, 0, 7, 10, 7], vec![2, 1]);
        let (mut images, mut labels) = (vec![9.0; 3], vec![9]);
        data.batch([1, 0, 1], &mut images, &mut labels);
        assert_eq!(labels, [1, 2, 1]);
        assert_eq!(images, [-1.0, 0.0, 1.0, 0.0].repeat(3));
    }

    #[test]
    fn a_test_set_is_normalised_like_its_training_set() {
        let geometry = Geometry { channels: 1, height: 1, width: 2, classes: 1 };
        let train = Dataset::new(geometry, vec![0, 2], vec![0]);
        let test = Dataset::new(geometry, vec![2, 4], vec![0]).normalised_like(&train);
        let (mut images, mut labels) = (Vec::new(), Vec::new());
        test.batch([0], &mut images, &mut labels);
        assert_eq!(images, [1.0, 3.0]);
    }
}
