//! A planner beside a model of who holds what.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use super::input::Input;
use crate::sched::{
    AdmitError, BlockId, Cancelled, Outcome, Plan, Planner, SeqId, SeqRequest, Shape, SlotId, Step,
};

/// A planner, and what it must be doing.
pub(super) struct Model {
    planner: Planner,
    shape: Shape,
    lives: BTreeMap<SeqId, Life>,
    in_flight: Option<Step>,
    plan: Plan,
    seqs_admitted: u64,
}

/// A sequence that has not left.
struct Life {
    request: SeqRequest,
    /// While it runs.
    slot: Option<SlotId>,
    /// As far as plans have shown it.
    table: Vec<BlockId>,
    computed: u32,
    outputs: u32,
    /// Cancelled in flight: leaves when the step ends.
    leaves: bool,
}

impl Model {
    pub(super) fn new(input: &mut Input<'_>) -> Self {
        let mut size = |limit| 1 + u32::from(input.below(limit));
        let batch_seqs_max = size(8);
        let shape = Shape {
            block_tokens: size(8),
            block_count: size(32),
            batch_seqs_max,
            batch_tokens_max: batch_seqs_max + size(32),
            queue_max: size(8),
        };
        let planner = Planner::new(shape).expect("sizes in range");
        Self {
            planner,
            shape,
            lives: BTreeMap::new(),
            in_flight: None,
            plan: Plan::default(),
            seqs_admitted: 0,
        }
    }

    /// Makes the call that comes next in `input`.
    pub(super) fn call(&mut self, input: &mut Input<'_>) {
        match input.below(4) {
            0 => self.admit(u32::from(input.byte()), u32::from(input.below(32))),
            1 => self.cancel(usize::from(input.byte())),
            _ => match self.in_flight.take() {
                None => {
                    self.begin_step();
                }
                Some(step) => {
                    self.end_step(step, |_| if input.below(8) == 0 { Outcome::Last } else { Outcome::Token })
                }
            },
        }
        self.check_occupancy();
    }

    /// Steps until all have ended: each but the one in flight computes a position at least.
    pub(super) fn drain(&mut self) {
        let positions = |life: &Life| life.request.prompt_tokens + life.request.output_tokens_max;
        let steps_max = 2 + self.lives.values().map(positions).sum::<u32>();
        for _ in 0..steps_max {
            if self.in_flight.is_none() && !self.begin_step() {
                break;
            }
            let step = self.in_flight.take().expect("begun");
            self.end_step(step, |_| Outcome::Token);
            self.check_occupancy();
        }
        assert!(self.lives.is_empty(), "{} do not end", self.lives.len());
        assert_eq!(self.planner.occupancy().blocks_free, self.shape.block_count);
    }

    fn admit(&mut self, prompt_tokens: u32, output_tokens_max: u32) {
        let request = SeqRequest { prompt_tokens, output_tokens_max };
        let is_empty = prompt_tokens == 0 || output_tokens_max == 0;
        let fits = !is_empty && self.blocks_for(request) <= self.shape.block_count;
        let has_room = self.waiting_count() < self.shape.queue_max;
        match self.planner.admit(request) {
            Ok(seq) => {
                assert!(fits && has_room, "{request:?} is let in");
                self.seqs_admitted += 1;
                assert_eq!(seq.get(), self.seqs_admitted);
                let life =
                    Life { request, slot: None, table: Vec::new(), computed: 0, outputs: 0, leaves: false };
                self.lives.insert(seq, life);
            }
            Err(AdmitError::NeverFits) => assert!(!fits, "{request:?} would fit"),
            Err(AdmitError::QueueFull) => assert!(fits && !has_room, "the queue has room for {request:?}"),
        }
    }

    fn cancel(&mut self, index: usize) {
        let Some((&seq, life)) = self.lives.iter_mut().nth(index % 16) else { return };
        let expected = match (life.slot, &self.in_flight) {
            (None, _) => Cancelled::FromQueue,
            (Some(_), Some(_)) => Cancelled::AtStepEnd,
            (Some(slot), None) => Cancelled::FromSlot(slot),
        };
        assert_eq!(self.planner.cancel(seq), expected);
        if expected == Cancelled::AtStepEnd {
            life.leaves = true;
        } else {
            self.lives.remove(&seq);
            assert_eq!(self.planner.cancel(seq), Cancelled::Unknown);
        }
    }

    /// Returns whether there was work.
    fn begin_step(&mut self) -> bool {
        self.in_flight = self.planner.begin_step(&mut self.plan);
        if self.in_flight.is_none() {
            assert!(self.lives.is_empty(), "work without a step");
            return false;
        }
        assert!(self.planner.begin_step(&mut Plan::default()).is_none(), "two steps in flight");
        for &(seq, slot) in &self.plan.started {
            assert!(
                slot.0 < self.shape.batch_seqs_max && self.lives.values().all(|life| life.slot != Some(slot))
            );
            let life = self.lives.get_mut(&seq).expect("admitted and not gone");
            assert_eq!(life.slot.replace(slot), None, "started twice");
        }
        self.check_items();
        self.check_blocks();
        self.check_head_of_queue();
        true
    }

    fn check_items(&mut self) {
        let tokens: u32 = self.plan.items.iter().map(|item| item.positions.len() as u32).sum();
        assert!(tokens == self.plan.tokens && (1..=self.shape.batch_tokens_max).contains(&tokens));
        let mut planned = BTreeSet::new();
        for item in &self.plan.items {
            assert!(planned.insert(item.seq), "two items of one sequence");
            let life = self.lives.get_mut(&item.seq).expect("admitted and not gone");
            assert_eq!(Some(item.slot), life.slot);
            assert_eq!(item.positions.start, life.computed, "a gap, or computed twice");
            assert!(!item.positions.is_empty());
            life.computed = item.positions.end;
            assert_eq!(item.samples, life.computed >= life.request.prompt_tokens);

            let table = &self.plan.block_tables[item.blocks.start as usize..item.blocks.end as usize];
            assert!(table.len() as u32 * self.shape.block_tokens >= item.positions.end, "a table too short");
            let known = life.table.len().min(table.len());
            assert_eq!(life.table[..known], table[..known], "a table changed");
            life.table.extend_from_slice(&table[known..]);
        }
    }

    fn check_blocks(&self) {
        let mut held = BTreeSet::new();
        for block in self.lives.values().flat_map(|life| &life.table) {
            assert!(block.0 < self.shape.block_count && held.insert(*block), "{block:?} is held twice");
        }
    }

    /// The head of the queue waits only for tokens, a slot or blocks.
    fn check_head_of_queue(&self) {
        let running = self.lives.values().filter(|life| life.slot.is_some());
        let Some(head) = self.lives.values().find(|life| life.slot.is_none()) else { return };
        let no_tokens = self.plan.tokens == self.shape.batch_tokens_max;
        let no_slot = running.count() as u32 == self.shape.batch_seqs_max;
        let no_blocks = self.blocks_for(head.request) > self.planner.occupancy().blocks_free;
        assert!(no_tokens || no_slot || no_blocks, "the head of the queue waits for nothing");
        let overtaken =
            self.lives.values().skip_while(|life| life.slot.is_some()).any(|life| life.slot.is_some());
        assert!(!overtaken, "the head of the queue is overtaken");
    }

    fn end_step(&mut self, step: Step, mut sample: impl FnMut(SeqId) -> Outcome) {
        let mut outcomes = Vec::new();
        for item in &self.plan.items {
            let life = self.lives.get_mut(&item.seq).expect("a planned sequence stays until its step ends");
            outcomes.push(if item.samples { sample(item.seq) } else { Outcome::Chunk });
            life.outputs += u32::from(item.samples);
            let is_last = outcomes.last() == Some(&Outcome::Last);
            life.leaves |= is_last || life.outputs == life.request.output_tokens_max;
        }
        let mut left = Vec::new();
        self.planner.end_step(step, &self.plan, &outcomes, &mut left);
        let leaving = self.lives.iter().filter(|(_, life)| life.leaves);
        let expected: Vec<_> =
            leaving.map(|(seq, life)| (*seq, life.slot.expect("only what runs can leave here"))).collect();
        assert_eq!(left, expected);
        self.lives.retain(|_, life| !life.leaves);
    }

    fn check_occupancy(&self) {
        let running = self.lives.values().filter(|life| life.slot.is_some());
        let held: u32 = running.map(|life| self.blocks_for(life.request)).sum();
        let occupancy = self.planner.occupancy();
        assert_eq!(occupancy.blocks_free + held, self.shape.block_count);
        assert_eq!(occupancy.waiting, self.waiting_count());
        assert_eq!(occupancy.running + occupancy.waiting, self.lives.len() as u32);
    }

    fn waiting_count(&self) -> u32 {
        self.lives.values().filter(|life| life.slot.is_none()).count() as u32
    }

    /// Blocks for all positions but that of the last token, which is sampled and never computed on.
    const fn blocks_for(&self, request: SeqRequest) -> u32 {
        (request.prompt_tokens + request.output_tokens_max - 1).div_ceil(self.shape.block_tokens)
    }
}
