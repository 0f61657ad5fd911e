//! The message that one worker sends to all others for one layer and step.
//!
//! | bytes | what |
//! |---|---|
//! | 4 | the step, from 0 |
//! | 4 | the number of samples |
//! | 2 x [`Hyperparameters::WIRE_BYTES`] | the sender's hyperparameters of weight and bias for this step; all ranks use rank 0's |
//! | the layer's samples x outputs elements | output gradients; rows after the header's samples are unused |
//! | the layer's samples x inputs elements | inputs, likewise |
//!
//! Numbers are little-endian. All messages of a layer are equally long, so that every rank knows how long the
//! others' are.

use std::ops::Range;

use paramhub_core::hyperparameters::Hyperparameters;

use crate::layer::{FactorLayer, LayerFactors};

const STEP: Range<usize> = 0..4;
const SAMPLES: Range<usize> = 4..8;
const HYPERPARAMETERS_AT: usize = 8;
const FACTORS_AT: usize = HYPERPARAMETERS_AT + 2 * Hyperparameters::WIRE_BYTES;

/// The header ahead of the factors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct FactorMessageHeader {
    pub(crate) step: u32,
    pub(crate) samples: u32,
    /// The hyperparameters of weight and bias.
    pub(crate) hyperparameters: [Hyperparameters; 2],
}

/// Bytes of a layer's message; `None` if the number overflows.
pub(crate) fn bytes(layer: &FactorLayer) -> Option<usize> {
    let elements = layer.shape.0.checked_add(layer.shape.1)?.checked_mul(layer.samples)?;
    elements.checked_mul(layer.codec.bytes())?.checked_add(FACTORS_AT)
}

/// Writes a message of [`bytes`] bytes. The caller makes sure that the factors have at most the layer's samples, and
/// that the header has the same number.
pub(crate) fn write(
    layer: &FactorLayer,
    header: &FactorMessageHeader,
    factors: LayerFactors<'_>,
    message: &mut [u8],
) {
    message[STEP].copy_from_slice(&header.step.to_le_bytes());
    message[SAMPLES].copy_from_slice(&header.samples.to_le_bytes());
    let places = message[HYPERPARAMETERS_AT..FACTORS_AT].chunks_exact_mut(Hyperparameters::WIRE_BYTES);
    for (place, hyperparameters) in places.zip(&header.hyperparameters) {
        place.copy_from_slice(&hyperparameters.to_wire());
    }
    let inputs = inputs_at(layer);
    message[FACTORS_AT..][..factors.output_gradients.len()].copy_from_slice(factors.output_gradients);
    message[inputs..][..factors.inputs.len()].copy_from_slice(factors.inputs);
}

/// Reads a message's header. `None` if its hyperparameters are not valid.
pub(crate) fn read_header(message: &[u8]) -> Option<FactorMessageHeader> {
    let number = |range: Range<usize>| u32::from_le_bytes(message[range].try_into().expect("a fixed range"));
    let mut hyperparameters = [Hyperparameters::default(); 2];
    let (places, _) = message[HYPERPARAMETERS_AT..FACTORS_AT].as_chunks::<{ Hyperparameters::WIRE_BYTES }>();
    for (read, place) in hyperparameters.iter_mut().zip(places) {
        *read = Hyperparameters::from_wire(place)?;
    }
    Some(FactorMessageHeader { step: number(STEP), samples: number(SAMPLES), hyperparameters })
}

/// The factors of a message with this number of samples.
pub(crate) fn factors<'a>(layer: &FactorLayer, samples: usize, message: &'a [u8]) -> LayerFactors<'a> {
    let bytes_per_column = samples * layer.codec.bytes();
    LayerFactors {
        output_gradients: &message[FACTORS_AT..][..bytes_per_column * layer.shape.0],
        inputs: &message[inputs_at(layer)..][..bytes_per_column * layer.shape.1],
    }
}

fn inputs_at(layer: &FactorLayer) -> usize {
    FACTORS_AT + layer.samples * layer.shape.0 * layer.codec.bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(bytes: &[u8]) -> Vec<f32> {
        bytes.as_chunks().0.iter().map(|&number| f32::from_le_bytes(number)).collect()
    }

    #[test]
    fn a_message_survives_with_fewer_samples_than_there_is_room_for() {
        let layer = FactorLayer::new("fc", (2, 3), 4);
        let hyperparameters = Hyperparameters { learning_rate: 0.25, ..Hyperparameters::default() };
        let header = FactorMessageHeader {
            step: 7,
            samples: 3,
            hyperparameters: [Hyperparameters::default(), hyperparameters],
        };
        let (inputs, output_gradients) = ([1.5_f32; 9], [2.5_f32; 6]);
        let mut message = vec![0xff; bytes(&layer).unwrap()];
        write(&layer, &header, LayerFactors::of_f32(&inputs, &output_gradients), &mut message);
        assert_eq!(read_header(&message), Some(header));
        let read = factors(&layer, 3, &message);
        assert_eq!(numbers(read.inputs), inputs);
        assert_eq!(numbers(read.output_gradients), output_gradients);
    }
}
