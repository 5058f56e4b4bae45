//! One step of a model on the lanes of a pool.
//!
//! Every lane runs the same operations over the same arrays. What keeps them apart is the split of each operation's
//! output, [`Lane::share`] of its rows or of its panels of columns, and [`Lane::meet`] before anything is read that
//! another lane wrote. The unsafe blocks below each name the split and the meeting that they rely on.
//!
//! A row's result never depends on the split: each output value is computed whole by one lane, in an order fixed by the
//! model's widths and the row's position.

use core::ops::Range;
use std::io;
use std::sync::{Mutex, PoisonError};

use uring_serve_core::sched::Shape;

use super::kernels::{BLOCK, Block, KV_TILE, Kernels, QUERIES, ROWS, Running, SPAN, TILE, Tile};
use super::memory::Shared;
use super::panels::{self, Panels};
use super::pool::{Lane, LanePanicked, Pool};
use crate::model::{self, Batch, Config, Ops, Row, Weights};
use crate::weights::Tensor;

/// Packed weights, paged cache and the arrays between operations.
pub(super) struct Device {
    pub(super) config: Config,
    kernels: Kernels,
    block_tokens: usize,
    /// Radians per position for each rotated pair.
    frequencies: Vec<f64>,
    embedding: Panels,
    layers: Vec<Layer>,
    output_norm: Vec<f32>,
    /// `None` where the embedding serves.
    output: Option<Panels>,
    /// F16 bits, `[block, layer, KV head, tile, 2, KV_TILE * K]`: keys of a tile `[K, KV_TILE]`, values `[KV_TILE, K]`.
    cache: Shared<u16>,
    /// Residual stream, `[T, D]`.
    x: Shared<f32>,
    /// Normalised `x`, `[T, D / 32]`.
    h: Shared<Block>,
    /// Queries, keys and values, `[T, H * K + 2 * G * K]`.
    qkv: Shared<f32>,
    /// `[cos, sin]` of each rotated pair, `[T, rope_dims / 2, 2]`.
    turns: Shared<f32>,
    /// Output of attention, `[T, H * K / 32]`.
    attended: Shared<Block>,
    /// Output of the gate, `[T, F / 32]`.
    gated: Shared<Block>,
    /// `[batch_seqs_max, V]`.
    logits: Shared<f32>,
}

struct Layer {
    attention_norm: Vec<f32>,
    query: Panels,
    key: Panels,
    value: Panels,
    attention_output: Panels,
    feed_forward_norm: Vec<f32>,
    gate: Panels,
    up: Panels,
    down: Panels,
}

/// What one lane needs to itself.
pub(super) struct Scratch {
    /// Dot products of the gate, or of any other matrix, and of `Wu`.
    gates: Tile,
    ups: Tile,
    /// A normalised row, `[D]`.
    normal: Vec<f32>,
    /// Keys or values of a row in F16, `[G * K]`.
    halves: Vec<u16>,
    /// Queries against one KV head, `[QUERIES, K]`.
    queries: Vec<f32>,
    /// What attention mixed for them, `[QUERIES, K]`.
    mixed: Vec<f32>,
    /// The same in the order of the model, `[QUERIES, run of heads, K]`.
    heads: Vec<f32>,
    /// Scores, then weights, of one span.
    scores: Vec<[f32; SPAN]>,
}

impl Device {
    /// Packs the weights on `threads` threads and reserves everything else.
    ///
    /// # Errors
    /// The system's, when it has not that much memory.
    pub(super) fn new(
        config: Config,
        weights: &Weights<'_>,
        shape: &Shape,
        kernels: Kernels,
        threads: usize,
        progress: &dyn Fn(u64, u64),
    ) -> io::Result<Self> {
        let rows = shape.batch_tokens_max as usize;
        let frequency =
            |pair: usize| f64::from(config.rope_base).powf(-2.0 * pair as f64 / config.rope_dims as f64);
        let cache_rows = shape.block_count as usize * shape.block_tokens as usize * config.layers;
        let layers = weights.layers.iter().map(|layer| {
            Ok(Layer {
                attention_norm: gains(&layer.attention_norm),
                query: Panels::new(&layer.query)?,
                key: Panels::new(&layer.key)?,
                value: Panels::new(&layer.value)?,
                attention_output: Panels::new(&layer.attention_output)?,
                feed_forward_norm: gains(&layer.feed_forward_norm),
                gate: Panels::new(&layer.gate)?,
                up: Panels::new(&layer.up)?,
                down: Panels::new(&layer.down)?,
            })
        });
        let tied = core::ptr::eq(weights.output.bytes, weights.token_embedding.bytes);
        let mut device = Self {
            kernels,
            block_tokens: shape.block_tokens as usize,
            frequencies: (0..config.rope_dims / 2).map(frequency).collect(),
            embedding: Panels::new(&weights.token_embedding)?,
            layers: layers.collect::<io::Result<_>>()?,
            output_norm: gains(&weights.output_norm),
            output: if tied { None } else { Some(Panels::new(&weights.output)?) },
            cache: Shared::new(2 * cache_rows * config.kv_width())?,
            x: Shared::new(rows * config.d_model)?,
            h: Shared::new(rows * config.d_model.div_ceil(BLOCK))?,
            qkv: Shared::new(rows * (config.query_width() + 2 * config.kv_width()))?,
            turns: Shared::new(rows * config.rope_dims)?,
            attended: Shared::new(rows * config.query_width().div_ceil(BLOCK))?,
            gated: Shared::new(rows * config.d_ff.div_ceil(BLOCK))?,
            logits: Shared::new(shape.batch_seqs_max as usize * config.vocab)?,
            config,
        };
        device.pack(weights, threads, progress);
        Ok(device)
    }

    fn pack(&mut self, weights: &Weights<'_>, threads: usize, progress: &dyn Fn(u64, u64)) {
        let mut pieces = Vec::new();
        pieces.extend(self.embedding.pieces(weights.token_embedding));
        if let Some(output) = &mut self.output {
            pieces.extend(output.pieces(weights.output));
        }
        for (layer, tensors) in self.layers.iter_mut().zip(&weights.layers) {
            pieces.extend(layer.query.pieces(tensors.query));
            pieces.extend(layer.key.pieces(tensors.key));
            pieces.extend(layer.value.pieces(tensors.value));
            pieces.extend(layer.attention_output.pieces(tensors.attention_output));
            pieces.extend(layer.gate.pieces(tensors.gate));
            pieces.extend(layer.up.pieces(tensors.up));
            pieces.extend(layer.down.pieces(tensors.down));
        }
        panels::pack(pieces, threads, progress);
    }

    /// Computes one step on the lanes of `pool`, each with its own scratch. Allocates nothing.
    ///
    /// # Errors
    /// Those of [`Pool::run`].
    #[expect(clippy::needless_pass_by_ref_mut, reason = "the lanes write the arrays: nobody else may look")]
    pub(super) fn forward(
        &mut self,
        pool: &mut Pool,
        scratches: &[Mutex<Scratch>],
        batch: &Batch,
    ) -> Result<(), LanePanicked> {
        let device = &*self;
        pool.run(&|lane| {
            let mut scratch = scratches[lane.index].lock().unwrap_or_else(PoisonError::into_inner);
            let mut ops = LaneOps { device, lane, scratch: &mut scratch };
            model::forward(&mut ops, &device.config, batch);
        })
    }

    /// Gives each of the first `count` rows of logits to `work`, on one lane. Allocates nothing.
    ///
    /// # Errors
    /// Those of [`Pool::run`].
    #[expect(clippy::needless_pass_by_ref_mut, reason = "the lanes write the logits: nobody else may look")]
    pub(super) fn share_logits(
        &mut self,
        pool: &mut Pool,
        count: usize,
        work: &(dyn Fn(usize, &mut [f32]) + Sync),
    ) -> Result<(), LanePanicked> {
        let (logits, vocab) = (&self.logits, self.config.vocab);
        pool.run(&|lane| {
            for index in lane.share(count) {
                // SAFETY: rows of logits are split by `share`, and `&mut self` keeps everybody else from them.
                work(index, unsafe { logits.write(index * vocab..(index + 1) * vocab) });
            }
        })
    }

    /// Returns a row of logits.
    pub(super) fn logits_row(&self, index: usize) -> &[f32] {
        let vocab = self.config.vocab;
        // SAFETY: logits are written in `forward` and `share_logits` only, which borrow `self` mutably until all lanes
        // are done (`LaneOps` is made in the one and `Device::logits` used in the other, nowhere else).
        unsafe { self.logits.read(index * vocab..(index + 1) * vocab) }
    }

    /// Makes a lane's scratch.
    pub(super) fn scratch(&self) -> Scratch {
        let config = &self.config;
        Scratch {
            gates: [[[0.0; ROWS]; 2]; TILE],
            ups: [[[0.0; ROWS]; 2]; TILE],
            normal: vec![0.0; config.d_model],
            halves: vec![0; config.kv_width()],
            queries: vec![0.0; QUERIES * config.head_dim],
            mixed: vec![0.0; QUERIES * config.head_dim],
            heads: vec![0.0; QUERIES * config.query_width()],
            scores: vec![[0.0; SPAN]; QUERIES],
        }
    }

    /// Width of a row of queries, keys and values.
    fn qkv_width(&self) -> usize {
        self.config.query_width() + 2 * self.config.kv_width()
    }

    /// Where the keys of a position's tile start in the cache; its values follow.
    fn cache_tile(&self, layer: usize, batch: &Batch, row: &Row, kv_head: usize, position: usize) -> usize {
        let block = batch.blocks(row)[position / self.block_tokens].0 as usize;
        let tile = position % self.block_tokens / KV_TILE;
        let head = (block * self.config.layers + layer) * self.config.kv_heads + kv_head;
        (head * (self.block_tokens / KV_TILE) + tile) * 2 * KV_TILE * self.config.head_dim
    }

    /// KV heads that one item of attention covers: as many as it takes to end on a whole block of its output, so that
    /// no two lanes write one.
    fn head_run(&self) -> usize {
        let config = &self.config;
        let width = config.heads / config.kv_heads * config.head_dim;
        let fits = |run: &usize| config.kv_heads.is_multiple_of(*run) && (run * width).is_multiple_of(BLOCK);
        (1..config.kv_heads).find(fits).unwrap_or(config.kv_heads)
    }
}

/// One lane's view of a step.
struct LaneOps<'a> {
    device: &'a Device,
    lane: &'a Lane<'a>,
    scratch: &'a mut Scratch,
}

/// What a projection does with what the output held.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Store {
    Add,
    Replace,
}

impl Ops for LaneOps<'_> {
    fn embed(&mut self, batch: &Batch) {
        let device = self.device;
        let (width, turns_width) = (device.config.d_model, device.config.rope_dims);
        for t in self.lane.share(batch.rows.len()) {
            let row = &batch.rows[t];
            // SAFETY: rows of `x` and `turns` are split by `share`, and the arrays are idle: the last step ended with
            // all lanes done (`Pool::run`).
            let (x, turns) = unsafe {
                (
                    device.x.write(t * width..(t + 1) * width),
                    device.turns.write(t * turns_width..(t + 1) * turns_width),
                )
            };
            device.embedding.read_row(row.token as usize, x);
            for (turn, frequency) in turns.as_chunks_mut::<2>().0.iter_mut().zip(&device.frequencies) {
                // Angles in F64: at position 8,000 an F32 angle is off by up to 2^-12.
                let (sin, cos) = (f64::from(row.position) * frequency).sin_cos();
                *turn = [cos as f32, sin as f32];
            }
        }
        // No meeting: until the next one a lane reads its own rows only.
    }

    fn attention_input(&mut self, layer: usize, batch: &Batch) {
        let (device, rows) = (self.device, batch.rows.len());
        let layer = &device.layers[layer];
        self.normalise(&layer.attention_norm, rows, |t| t);
        self.lane.meet();
        let (query, kv) = (device.config.query_width(), device.config.kv_width());
        let matrices = [(&layer.query, 0), (&layer.key, query), (&layer.value, query + kv)];
        self.project(&matrices, &device.h, rows, &device.qkv, Store::Replace);
        self.lane.meet();
    }

    fn rotate_and_store(&mut self, layer: usize, batch: &Batch) {
        let device = self.device;
        let (width, dim, rope) = (device.qkv_width(), device.config.head_dim, device.config.rope_dims);
        let (query_width, kv_width) = (device.config.query_width(), device.config.kv_width());
        for t in self.lane.share(batch.rows.len()) {
            // SAFETY: rows of `qkv` are split by `share`; other lanes wrote columns of them before the meeting that
            // ended `attention_input`.
            let qkv = unsafe { device.qkv.write(t * width..(t + 1) * width) };
            // SAFETY: written in `embed`, not since.
            let turns = unsafe { device.turns.read(t * rope..(t + 1) * rope) };
            let (rotated, values) = qkv.split_at_mut(query_width + kv_width);
            for head in rotated.chunks_exact_mut(dim) {
                device.kernels.rotate(head, turns.as_chunks().0);
            }
            device.kernels.to_half(&rotated[query_width..], &mut self.scratch.halves);
            self.store_keys(layer, batch, t);
            device.kernels.to_half(values, &mut self.scratch.halves);
            self.store_values(layer, batch, t);
        }
        self.lane.meet();
    }

    fn attend(&mut self, layer: usize, batch: &Batch) {
        let (device, run) = (self.device, self.device.head_run());
        let tokens_max = (QUERIES * device.config.kv_heads / device.config.heads).max(1);
        let (mut first, mut item) = (0, 0);
        while first < batch.rows.len() {
            let tokens = first..first + consecutive(&batch.rows[first..], tokens_max);
            for kv_head in (0..device.config.kv_heads).step_by(run) {
                if self.lane.is_dealt(item) {
                    self.attend_run(layer, batch, tokens.clone(), kv_head..kv_head + run);
                }
                item += 1;
            }
            first = tokens.end;
        }
        self.lane.meet();
    }

    fn attention_output(&mut self, layer: usize, batch: &Batch) {
        let device = self.device;
        let matrix = &device.layers[layer].attention_output;
        self.project(&[(matrix, 0)], &device.attended, batch.rows.len(), &device.x, Store::Add);
        self.lane.meet();
    }

    fn feed_forward_input(&mut self, layer: usize, batch: &Batch) {
        let rows = batch.rows.len();
        self.normalise(&self.device.layers[layer].feed_forward_norm, rows, |t| t);
        self.lane.meet();
        for block in self.lane.share(self.device.config.d_ff.div_ceil(BLOCK)) {
            for first in (0..rows).step_by(TILE) {
                self.gate_block(layer, block, first..(first + TILE).min(rows));
            }
        }
        self.lane.meet();
    }

    fn feed_forward_output(&mut self, layer: usize, batch: &Batch) {
        let device = self.device;
        let matrix = &device.layers[layer].down;
        self.project(&[(matrix, 0)], &device.gated, batch.rows.len(), &device.x, Store::Add);
        self.lane.meet();
    }

    fn logits(&mut self, batch: &Batch) {
        let device = self.device;
        self.normalise(&device.output_norm, batch.logit_rows.len(), |index| batch.logit_rows[index] as usize);
        self.lane.meet();
        let matrix = device.output.as_ref().unwrap_or(&device.embedding);
        self.project(&[(matrix, 0)], &device.h, batch.logit_rows.len(), &device.logits, Store::Replace);
        // No meeting: `Pool::run` returns when all lanes are done.
    }
}

impl LaneOps<'_> {
    /// `h[i] = RMSNorm(x[row_of(i)]) * gains` for this lane's share of `count` rows, rounded to blocks.
    fn normalise(&mut self, gains: &[f32], count: usize, row_of: impl Fn(usize) -> usize) {
        let device = self.device;
        let (width, blocks) = (device.config.d_model, device.config.d_model.div_ceil(BLOCK));
        for i in self.lane.share(count) {
            let t = row_of(i);
            // SAFETY: `x` is written by `embed`, whose rows of this lane are those read here or which a meeting
            // followed, and by the projections that add to it, which a meeting follows.
            let x = unsafe { device.x.read(t * width..(t + 1) * width) };
            device.kernels.rms_norm(x, gains, device.config.rms_eps, &mut self.scratch.normal);
            // SAFETY: rows of `h` are split by `share`; the projection that last read `h` was followed by a meeting.
            let h = unsafe { device.h.write(i * blocks..(i + 1) * blocks) };
            device.kernels.quantise(&self.scratch.normal, h);
        }
    }

    /// `output = input W^T` for this lane's share of the panels of `matrices`, each with the column its output starts
    /// at.
    fn project(
        &mut self,
        matrices: &[(&Panels, usize)],
        input: &Shared<Block>,
        rows: usize,
        output: &Shared<f32>,
        store: Store,
    ) {
        let width: usize = matrices.iter().map(|(panels, _)| panels.rows()).sum();
        let share = self.lane.share(matrices.iter().map(|(panels, _)| panels.count()).sum());
        let sums = &mut self.scratch.gates;
        let mut before = 0;
        for (panels, column) in matrices {
            let (blocks, count) = (panels.blocks(), panels.count());
            for index in share.start.max(before)..share.end.min(before + count) {
                let (panel, columns) = (panels.panel(index - before), panels.panel_rows(index - before));
                for first in (0..rows).step_by(TILE) {
                    let last = (first + TILE).min(rows);
                    // SAFETY: a meeting separates every projection from the operation that wrote its input, and the
                    // operation that next writes it from the projection.
                    let tokens = unsafe { input.read(first * blocks..last * blocks) };
                    self.device.kernels.dot(panel, tokens, 0, sums);
                    for (t, [sums, _]) in (first..last).zip(&*sums) {
                        let at = t * width + column;
                        // SAFETY: columns of the output are split by `share` of the panels, and no projection reads
                        // what it writes; a meeting, or the end of the step, follows.
                        let output = unsafe { output.write(at + columns.start..at + columns.end) };
                        match store {
                            Store::Add => {
                                output.iter_mut().zip(sums).for_each(|(output, sum)| *output += sum)
                            }
                            Store::Replace => output.copy_from_slice(&sums[..columns.len()]),
                        }
                    }
                }
            }
            before += count;
        }
    }

    /// `gated = silu(h Wg^T) * (h Wu^T)` for 32 columns, two panels of each matrix, and at most [`TILE`] rows.
    fn gate_block(&mut self, layer: usize, block: usize, rows: Range<usize>) {
        let (device, layer) = (self.device, &self.device.layers[layer]);
        let blocks = layer.gate.blocks();
        // SAFETY: a meeting in `feed_forward_input` follows the writing of `h`, and another precedes the next.
        let tokens = unsafe { device.h.read(rows.start * blocks..rows.end * blocks) };
        let Scratch { gates, ups, .. } = &mut *self.scratch;
        for (side, panel) in (2 * block..2 * block + 2).enumerate() {
            if panel < layer.gate.count() {
                device.kernels.dot(layer.gate.panel(panel), tokens, side, gates);
                device.kernels.dot(layer.up.panel(panel), tokens, side, ups);
            } else {
                // Columns past the last are zero in `Wd` as well, but what is left of another step may be no number.
                gates.iter_mut().chain(&mut *ups).for_each(|tile| tile[side] = [0.0; ROWS]);
            }
        }
        let (gates, ups) = (&mut gates[..rows.len()], &ups[..rows.len()]);
        device.kernels.swiglu(gates.as_flattened_mut().as_flattened_mut(), ups.as_flattened().as_flattened());
        let width = device.config.d_ff.div_ceil(BLOCK);
        for (t, gate) in rows.zip(gates) {
            let at = t * width + block;
            // SAFETY: columns of `gated` are split by `share` of the blocks; the projection that last read it was
            // followed by a meeting, and one precedes the next.
            device.kernels.quantise(gate.as_flattened(), unsafe { device.gated.write(at..at + 1) });
        }
    }

    /// Writes the keys of row `t`, in `scratch.halves`, to the cache.
    fn store_keys(&self, layer: usize, batch: &Batch, t: usize) {
        let (device, row) = (self.device, &batch.rows[t]);
        let position = row.position as usize;
        for (kv_head, keys) in self.scratch.halves.chunks_exact(device.config.head_dim).enumerate() {
            let tile = device.cache_tile(layer, batch, row, kv_head, position);
            for (d, key) in keys.iter().enumerate() {
                // SAFETY: a position's keys are written by the lane that `share` gave its row; no two rows of a step
                // have the same place (`Cpu::claim_blocks`). Attention reads after the meeting that ends
                // `rotate_and_store`, and ended reading this layer before a meeting of the step before.
                unsafe { device.cache.set(tile + d * KV_TILE + position % KV_TILE, *key) };
            }
        }
    }

    /// Writes the values of row `t`, in `scratch.halves`, to the cache.
    fn store_values(&self, layer: usize, batch: &Batch, t: usize) {
        let (device, row) = (self.device, &batch.rows[t]);
        let (position, dim) = (row.position as usize, device.config.head_dim);
        for (kv_head, values) in self.scratch.halves.chunks_exact(dim).enumerate() {
            let tile = device.cache_tile(layer, batch, row, kv_head, position);
            let at = tile + KV_TILE * dim + position % KV_TILE * dim;
            // SAFETY: as in `store_keys`; a position's values are a range of their own.
            unsafe { device.cache.write(at..at + dim) }.copy_from_slice(values);
        }
    }

    /// Attention of consecutive rows of one sequence, for the query heads of a run of KV heads.
    fn attend_run(&mut self, layer: usize, batch: &Batch, tokens: Range<usize>, kv_heads: Range<usize>) {
        let device = self.device;
        let (group, dim) = (device.config.heads / device.config.kv_heads, device.config.head_dim);
        let run_width = kv_heads.len() * group * dim;
        for kv_head in kv_heads.clone() {
            // At most QUERIES at a time: several rows where a group is small, part of a group where it is large.
            let queries: usize = tokens.len() * group;
            for first in (0..queries).step_by(QUERIES) {
                let part = first..(first + QUERIES).min(queries);
                let place = |query: usize| (tokens.start + query / group, kv_head * group + query % group);
                for (query, values) in part.clone().zip(self.scratch.queries.chunks_exact_mut(dim)) {
                    let (t, head) = place(query);
                    let at = t * device.qkv_width() + head * dim;
                    // SAFETY: `qkv` was last written before the meeting that ended `rotate_and_store`, and is next
                    // after the one that ends `attend`.
                    values.copy_from_slice(unsafe { device.qkv.read(at..at + dim) });
                }
                self.attend_part(layer, batch, tokens.start, kv_head, part.clone());
                for (query, values) in part.zip(self.scratch.mixed.chunks_exact(dim)) {
                    let (t, head) = place(query);
                    let at = (t - tokens.start) * run_width + (head - kv_heads.start * group) * dim;
                    self.scratch.heads[at..at + dim].copy_from_slice(values);
                }
            }
        }
        let blocks = device.config.query_width().div_ceil(BLOCK);
        for (t, heads) in tokens.zip(self.scratch.heads.chunks_exact(run_width)) {
            let at = t * blocks + kv_heads.start * group * dim / BLOCK;
            // SAFETY: items of attention are dealt to one lane each and write whole blocks of their own (`head_run`);
            // the projection that last read `attended` was followed by a meeting, and one precedes the next.
            device
                .kernels
                .quantise(heads, unsafe { device.attended.write(at..at + run_width.div_ceil(BLOCK)) });
        }
    }

    /// `scratch.mixed = softmax(queries K^T / sqrt(dim)) V` for the queries `part` of the group of `first_row` and the
    /// rows after it, span by span from the sequence's start.
    fn attend_part(
        &mut self,
        layer: usize,
        batch: &Batch,
        first_row: usize,
        kv_head: usize,
        part: Range<usize>,
    ) {
        let device = self.device;
        let (group, dim) = (device.config.heads / device.config.kv_heads, device.config.head_dim);
        let Scratch { queries, mixed, scores, .. } = &mut *self.scratch;
        let (queries, mixed) = (&queries[..part.len() * dim], &mut mixed[..part.len() * dim]);
        let scores = &mut scores[..part.len()];
        let row = &batch.rows[first_row];
        let visible = |query: usize| row.position as usize + query / group + 1;
        let longest = visible(part.end - 1);
        let mut running = [Running::START; QUERIES];
        mixed.fill(0.0);
        for span in (0..longest).step_by(SPAN) {
            let positions = (longest - span).min(SPAN);
            let tiles = positions.div_ceil(KV_TILE);
            let (mut keys, mut values) = ([&[][..]; SPAN / KV_TILE], [&[][..]; SPAN / KV_TILE]);
            for (tile, (keys, values)) in keys.iter_mut().zip(&mut values).take(tiles).enumerate() {
                let at = device.cache_tile(layer, batch, row, kv_head, span + tile * KV_TILE);
                // SAFETY: this layer of the cache was last written before the meeting that ended `rotate_and_store`,
                // and is next in another step.
                let tile = unsafe { device.cache.read(at..at + 2 * KV_TILE * dim) };
                (*keys, *values) = tile.split_at(KV_TILE * dim);
            }
            let scale = 1.0 / (dim as f32).sqrt();
            device.kernels.scores(queries, &keys[..tiles], scale, scores);
            let each = part.clone().zip(&mut *scores).zip(&mut running).zip(mixed.chunks_exact_mut(dim));
            for (((query, scores), running), mixed) in each {
                let seen = visible(query).saturating_sub(span).min(positions);
                let factor = device.kernels.soften(scores, seen, tiles * KV_TILE, running);
                device.kernels.scale(mixed, factor);
            }
            device.kernels.mix(scores, &values[..tiles], positions, mixed);
        }
        for (mixed, running) in mixed.chunks_exact_mut(dim).zip(running) {
            device.kernels.scale(mixed, 1.0 / running.sum);
        }
    }
}

/// Counts the rows at the front, at most `max`, that follow each other in one sequence.
fn consecutive(rows: &[Row], max: usize) -> usize {
    let follows =
        |pair: &&[Row]| pair[0].blocks == pair[1].blocks && pair[0].position + 1 == pair[1].position;
    1 + rows.windows(2).take(max - 1).take_while(follows).count()
}

fn gains(tensor: &Tensor<'_>) -> Vec<f32> {
    let mut values = vec![0.0; tensor.columns()];
    tensor.dequantise(&mut values);
    values
}
