//! Layers whose factors come here: their blocks, and the gradient that is made of them, a tile at a time.
//!
//! A gradient is made where sums are, band of rows by band of rows, and a chunk is updated and answered as soon as all of its rows
//! are there. Tiles and updates are turns of their own between those of streams, so that a large product keeps nobody waiting.

use std::ops::Range;

use paramhub_core::exchange::{Gathered, Gathering, Then};
use paramhub_core::factors::FactorBlock;
use paramhub_core::wire::{FACTORS_HEAD_BYTES, Factors as Wire, Header};
use paramhub_kernels::factors::{Factors, Tiling};
use paramhub_kernels::{convert, finite};

use super::Shard;
use crate::core::buffer::{Buffer, OutOfMemory, Pages};
use crate::core::fault::Fault;
use crate::core::plan::{Layout, ShardPlan};

/// Output gradients that are added up at once: no more than a tile of the weight takes.
const BIAS_TURN_NUMBERS: usize = 1 << 20;
/// Rows below which more of the cache would be read than is used.
const BIAS_ROWS_MIN: usize = 64;

/// All such layers of a shard, most urgent first.
pub(in crate::core) struct FactorLayers {
    gathering: Gathering,
    layers: Vec<Layer>,
}

struct Layer {
    /// All ranks' samples, in rank order, room for the most of each.
    inputs: Buffer,
    output_gradients: Buffer,
    tiling: Tiling,
    making: Option<Making>,
}

/// How far a gradient is made.
#[derive(Clone, Copy, Debug, Default)]
struct Making {
    /// Elements of the bias that are made.
    bias: usize,
    /// Rows of the weight that are made, and columns of the band that follows them.
    rows: usize,
    columns: usize,
    /// Chunks that are complete, counted through the bias' and then the weight's.
    chunks: u32,
}

impl FactorLayers {
    pub(super) fn new(plan: &ShardPlan, layout: &Layout) -> Result<Self, OutOfMemory> {
        let members = plan.ports.workers();
        let layers = layout.factors.iter().map(|layer| {
            let [inputs, output_gradients] = elements(&layer.block, members).map(|count| count as usize);
            Ok(Layer {
                inputs: Buffer::reserved(inputs, 6)?,
                output_gradients: Buffer::reserved(output_gradients, 7)?,
                tiling: Tiling::new(layer.block.inputs, members as usize * layer.block.samples as usize),
                making: None,
            })
        });
        let layers = layers.collect::<Result<_, _>>()?;
        Ok(FactorLayers { gathering: Gathering::new(layout.factors.clone(), members), layers })
    }

    /// Its arrays.
    pub(super) fn each_array(&mut self, each: &mut dyn FnMut(&mut dyn Pages)) {
        for layer in &mut self.layers {
            each(&mut layer.inputs);
            each(&mut layer.output_gradients);
        }
    }

    /// Nothing more is made.
    pub(super) fn stop(&mut self) {
        self.layers.iter_mut().for_each(|layer| layer.making = None);
    }

    /// Bytes that [`new`](Self::new) will take.
    pub(in crate::core) fn memory_bytes(plan: &ShardPlan, layout: &Layout) -> u64 {
        let members = plan.ports.workers();
        let counts = layout.factors.iter().flat_map(|layer| elements(&layer.block, members));
        let bytes = counts.fold(0_u64, |sum, count| sum.saturating_add(count.saturating_mul(4)));
        bytes.saturating_add(Gathering::memory_bytes(layout.factors.len(), members))
    }

    pub(super) fn resume(&mut self, member: u32) {
        self.gathering.resume(member);
    }
}

/// Of the inputs and the output gradients of so many workers.
fn elements(block: &FactorBlock, members: u32) -> [u64; 2] {
    let samples = u64::from(block.samples) * u64::from(members);
    [block.inputs, block.outputs].map(|row| samples.saturating_mul(row as u64))
}

impl Shard {
    /// Refuses a header of a piece.
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
        header: &Header,
        payload: &[u8],
    ) -> Result<(), Fault> {
        let (index, slot) = self.slot(header.chunk)?;
        let Wire { samples, piece, values } = Wire::decode(payload).expect("its length was checked");
        let FactorLayers { gathering, layers } = &mut self.factors;
        let number = gathering.layer_at(index).expect("its layer was checked");
        let elements = values.len() / header.codec.bytes();
        let gathered =
            gathering.piece(&mut self.exchange, (number, member), header.step, (samples, piece), elements);
        let Gathered { piece, then } = match gathered {
            Ok(gathered) => gathered,
            Err(offence) => return Err(self.offence(header.chunk, slot.key, offence)),
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
            Some(Then::Repeated) => {
                for slot in self.factors.gathering.layers()[number].slots() {
                    self.settle(slot);
                }
                self.stranded_at(index)
            }
            Some(then) => {
                self.counters.contributions += self.factors.gathering.layers()[number].slots().count() as u64;
                match then {
                    Then::Make => self.factors.layers[number].making = Some(Making::default()),
                    Then::Wait => return self.stranded_at(index),
                    other => unreachable!("{other:?} is not of chunks that are made"),
                }
                Ok(())
            }
        }
    }

    /// Whether a gradient is to be made.
    pub(crate) fn is_making(&self) -> bool {
        self.factors.layers.iter().any(|layer| layer.making.is_some())
    }

    /// Makes a tile of the most urgent gradient, or completes some chunks, of about so many elements, that are made.
    pub(crate) fn make_some(&mut self, elements: usize) -> Result<(), Fault> {
        let Some(number) = self.factors.layers.iter().position(|layer| layer.making.is_some()) else {
            return Ok(());
        };
        let books = &self.factors.gathering.layers()[number];
        let (block, weight, bias) = (books.block, books.weight.clone(), books.bias.clone());
        let mut making = self.factors.layers[number].making.expect("it was just looked for");
        let before = making.chunks;
        let mut done = 0;
        while done < elements
            && let Some(index) = making.next_chunk(&block, &weight, &bias, |index| {
                let slot = self.slots[index as usize];
                slot.first as usize + slot.elements as usize
            })
        {
            making.chunks += 1;
            // In the shard's books before something can fail.
            self.factors.layers[number].making = Some(making);
            let slot = self.slots[index as usize];
            self.merged[index as usize] = true;
            let then = self.exchange.made(index);
            self.go_on(index, slot, then)?;
            done += slot.elements as usize;
        }
        if making.chunks as usize == weight.len() + bias.len() {
            self.factors.layers[number].making = None;
            return Ok(());
        }
        // One thing a turn: an update or a product.
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
        making: &mut Making,
    ) {
        let layer = &self.factors.layers[number];
        let samples = self.plan.ports.workers() as usize * block.samples as usize;
        let (rows, columns) = (block.outputs, block.inputs);
        let factors = Factors::new(samples, (rows, columns), &layer.inputs, &layer.output_gradients);
        // Chunks of one key lie back to back here.
        if !bias.is_empty() && making.bias < rows {
            let some = (BIAS_TURN_NUMBERS / samples.max(1)).max(BIAS_ROWS_MIN);
            let part = making.bias..rows.min(making.bias + some);
            making.bias = part.end;
            let start = self.slots[bias.start as usize].offset;
            let target = &mut self.merge[start + part.start..start + part.end];
            return factors.bias_gradient_of(part, target);
        }
        let band = making.rows..rows.min(making.rows + layer.tiling.rows);
        let tile = making.columns..columns.min(making.columns + layer.tiling.columns);
        let start = self.slots[weight.start as usize].offset + band.start * columns + tile.start;
        let end = self.slots[weight.start as usize].offset + band.end * columns;
        *making = match tile.end == columns {
            true => Making { rows: band.end, columns: 0, ..*making },
            false => Making { columns: tile.end, ..*making },
        };
        factors.weight_gradient_into(band, tile, &mut self.merge[start..end], columns);
    }
}

impl Making {
    /// The next chunk all of whose gradient is made, where `end` is that of a chunk in its key.
    fn next_chunk(
        &self,
        block: &FactorBlock,
        weight: &Range<u32>,
        bias: &Range<u32>,
        end: impl Fn(u32) -> usize,
    ) -> Option<u32> {
        let of_bias = bias.len() as u32;
        if self.chunks < of_bias {
            let index = bias.start + self.chunks;
            return (end(index) <= self.bias).then_some(index);
        }
        let index = weight.start + self.chunks - of_bias;
        (index < weight.end && end(index) <= self.rows * block.inputs).then_some(index)
    }
}

impl Layer {
    /// A block with fewer samples than it may have leaves the rest of its place as it was before: nothing comes of zeros.
    fn clear_missing(&mut self, block: &FactorBlock, member: u32, samples: u32) {
        let (first, most) = (member as usize * block.samples as usize, block.samples as usize);
        for (row, target) in [(block.outputs, &mut self.output_gradients), (block.inputs, &mut self.inputs)] {
            target[(first + samples as usize) * row..(first + most) * row].fill(0.0);
        }
    }
}
