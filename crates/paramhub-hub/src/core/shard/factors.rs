//! Layers whose factors come to the hub: their blocks, and the gradient that is made of them, a tile at a
//! time.
//!
//! A gradient is made at the place of sums, one band of rows after the other, and a chunk is updated and
//! answered as soon as all of its rows are made. Tiles and updates have turns of their own between those of
//! streams, so a large product does not keep other streams waiting.

use std::ops::Range;

use paramhub_core::exchange::{Gathered, SumAction};
use paramhub_core::factors::FactorBlock;
use paramhub_core::wire::{FACTORS_HEAD_BYTES, Factors as Wire, Header};
use paramhub_kernels::factors::Factors;
use paramhub_kernels::{convert, finite};

use super::Shard;
use super::checks::CheckedHeader;
use crate::core::factor_layers::{FactorLayers, MakeProgress};
use crate::core::fault::Fault;

/// Output gradients that are added up at once: no more than a tile of the weight takes.
const BIAS_TURN_NUMBERS: usize = 1 << 20;
/// With fewer rows, more of the cache would be read than used.
const BIAS_ROWS_MIN: usize = 64;

impl Shard {
    /// Refuses an invalid header of a piece.
    pub(super) fn check_factors(&self, index: u32, header: &Header) -> Result<(), Fault> {
        let slot = self.slots[index as usize];
        let Some(layer) = self.factors.gathering.layer_at(index) else {
            return Err(Fault::NoFactors { chunk: header.chunk, key: self.key_name(slot.key) });
        };
        let block = &self.factors.gathering.layers()[layer].block;
        let value = block.codec.bytes() as u32;
        let most = FACTORS_HEAD_BYTES as u32 + block.piece_elements as u32 * value;
        let fits = header.codec == block.codec
            && (FACTORS_HEAD_BYTES as u32..=most).contains(&header.length)
            && (header.length - FACTORS_HEAD_BYTES as u32).is_multiple_of(value);
        if !fits {
            return Err(Fault::Factors {
                key: self.key_name(slot.key),
                got: header.length,
                codec: header.codec,
                most,
                expected_codec: block.codec,
            });
        }
        Ok(())
    }

    /// Takes a piece of a worker's block, whose header has been checked.
    pub(super) fn gather_factors(
        &mut self,
        member: u32,
        checked: &CheckedHeader,
        payload: &[u8],
    ) -> Result<(), Fault> {
        let (header, (index, slot)) = (&checked.header, self.located(checked));
        let Wire { samples, piece, values } = Wire::decode(payload).expect("its length was checked");
        let FactorLayers { gathering, layers } = &mut self.factors;
        let number = gathering.layer_at(index).expect("its layer was checked");
        let elements = values.len() / header.codec.bytes();
        let gathered =
            gathering.piece(&mut self.exchange, (number, member), header.step, (samples, piece), elements);
        let Gathered { piece, then } = match gathered {
            Ok(gathered) => gathered,
            Err(violation) => return Err(self.violation(header.chunk, slot.key, violation)),
        };
        if let Some(piece) = piece {
            if self.plan.settings.reject_non_finite
                && finite::first_non_finite(values, header.codec).is_some()
            {
                return Err(Fault::NonFiniteFactors { key: self.key_name(slot.key) });
            }
            let (gradients, inputs) = values.split_at(piece.output_gradients.len() * header.codec.bytes());
            let (block, layer) = (gathering.layers()[number].block, &mut layers[number]);
            let first = member as usize * block.samples as usize;
            for (wire, range, row, target) in [
                (gradients, piece.output_gradients, block.outputs, &mut layer.output_gradients),
                (inputs, piece.inputs, block.inputs, &mut layer.inputs),
            ] {
                let target = &mut target[first * row..][range];
                convert::decode(wire, target, header.codec);
            }
            if then.is_some() {
                layer.clear_missing(&block, member, samples);
            }
        }
        match then {
            None => Ok(()),
            Some(SumAction::Repeated) => {
                for slot in self.factors.gathering.layers()[number].slots() {
                    self.settle(slot);
                }
                self.stranded_at(index)
            }
            Some(then) => {
                self.counters.contributions += self.factors.gathering.layers()[number].slots().count() as u64;
                match then {
                    SumAction::Make => self.factors.layers[number].making = Some(MakeProgress::default()),
                    SumAction::Wait => return self.stranded_at(index),
                    other => unreachable!("{other:?} is not of chunks that are made"),
                }
                Ok(())
            }
        }
    }

    /// Returns whether a gradient is being made.
    pub(crate) fn is_making(&self) -> bool {
        self.factors.layers.iter().any(|layer| layer.making.is_some())
    }

    /// Makes a tile of the most urgent gradient, or completes some of its chunks, about `elements` elements.
    pub(crate) fn make_some(&mut self, elements: usize) -> Result<(), Fault> {
        let Some(number) = self.factors.layers.iter().position(|layer| layer.making.is_some()) else {
            return Ok(());
        };
        let gathered = &self.factors.gathering.layers()[number];
        let (block, weight, bias) = (gathered.block, gathered.weight.clone(), gathered.bias.clone());
        let mut making = self.factors.layers[number].making.expect("it was just looked for");
        let before = making.chunks;
        let mut done = 0;
        while done < elements
            && let Some(index) = making.next_chunk(&block, &weight, &bias, |index| {
                let slot = self.slots[index as usize];
                slot.key_offset as usize + slot.elements as usize
            })
        {
            making.chunks += 1;
            // Stored before anything can fail.
            self.factors.layers[number].making = Some(making);
            let slot = self.slots[index as usize];
            self.sums.is_made(index);
            let then = self.exchange.made(index);
            self.go_on(index, slot, then)?;
            done += slot.elements as usize;
        }
        if making.chunks as usize == weight.len() + bias.len() {
            self.factors.layers[number].making = None;
            return Ok(());
        }
        // A turn does one thing: an update or a product.
        if making.chunks == before {
            self.make_tile(number, &block, (&weight, &bias), &mut making);
            self.factors.layers[number].making = Some(making);
        }
        Ok(())
    }

    fn make_tile(
        &mut self,
        number: usize,
        block: &FactorBlock,
        (weight, bias): (&Range<u32>, &Range<u32>),
        making: &mut MakeProgress,
    ) {
        let layer = &self.factors.layers[number];
        let samples = self.plan.ports.workers() as usize * block.samples as usize;
        let (rows, columns) = (block.outputs, block.inputs);
        let factors = Factors::new(samples, (rows, columns), &layer.inputs, &layer.output_gradients);
        // Here the chunks of one key are back to back.
        if !bias.is_empty() && making.bias < rows {
            let some = (BIAS_TURN_NUMBERS / samples.max(1)).max(BIAS_ROWS_MIN);
            let part = making.bias..rows.min(making.bias + some);
            making.bias = part.end;
            let start = self.slots[bias.start as usize].array_offset;
            let target = self.sums.part_mut(start + part.start..start + part.end);
            return factors.bias_gradient_of(part, target);
        }
        let band = making.rows..rows.min(making.rows + layer.tiling.rows);
        let tile = making.columns..columns.min(making.columns + layer.tiling.columns);
        let start = self.slots[weight.start as usize].array_offset + band.start * columns + tile.start;
        let end = self.slots[weight.start as usize].array_offset + band.end * columns;
        *making = match tile.end == columns {
            true => MakeProgress { rows: band.end, columns: 0, ..*making },
            false => MakeProgress { columns: tile.end, ..*making },
        };
        factors.weight_gradient_into(band, tile, self.sums.part_mut(start..end), columns);
    }
}
