//! The planner under random arrivals, cancels and ends, against a checker that knows only its public promises.
//!
//! Each seed is one run: a random shape, random calls, no clock and no thread. A run that fails names its seed;
//! `PLANNER_SEED=<n> cargo test -p uring-serve-tests --test planner_simulation` repeats it alone.

use std::collections::{BTreeMap, VecDeque};

use uring_serve_core::sched::{
    AdmitError, BlockId, Cancelled, Item, Occupancy, Outcome, Plan, Planner, SeqId, SeqRequest, Shape,
    SlotId, Step,
};

const SEED_COUNT: u64 = 2_000;
const MUTANT_SEED_COUNT: u64 = 300;

#[test]
fn every_seed_keeps_every_promise() {
    let seeds = match std::env::var("PLANNER_SEED") {
        Ok(seed) => {
            let seed = seed.parse().expect("PLANNER_SEED is a number");
            seed..seed + 1
        }
        Err(_) => 0..SEED_COUNT,
    };
    let mut sum = Summary::default();
    for seed in seeds.clone() {
        let _named = NameSeedOnPanic(seed);
        match simulate(seed, &mut |shape| Real { planner: planner(shape), step: None }) {
            Ok(summary) => sum.add(summary),
            Err(broken) => panic!("seed {seed}: {broken}"),
        }
    }
    println!("{} seeds: {sum:?}", seeds.end - seeds.start);
    if seeds.end - seeds.start == SEED_COUNT {
        assert!(sum.least() > SEED_COUNT, "the simulation no longer reaches what it is for: {sum:?}");
    }
}

/// The checker must notice a planner that breaks a promise, by the check that is for it.
#[test]
fn every_mutant_is_caught() {
    let mutants = [
        (Bug::FreesAtCancel, "freed under the device"),
        (Bug::ForgetsCancel, "left is not who ended or was cancelled"),
        (Bug::Overtakes, "overtakes the queue's head"),
        (Bug::PassesBudget, "tokens pass the budget"),
        (Bug::SharesBlock, "is held by two sequences"),
        (Bug::SkipsDecode, "not every finished prompt decodes"),
        (Bug::ShortTable, "table does not cover the positions"),
    ];
    for (bug, expected) in mutants {
        let first = (0..MUTANT_SEED_COUNT).find_map(|seed| {
            simulate(seed, &mut |shape| Mutant::new(shape, bug)).err().map(|why| (seed, why))
        });
        let (seed, why) = first.unwrap_or_else(|| panic!("{bug:?} is not noticed"));
        assert!(why.contains(expected), "{bug:?}, seed {seed}: expected `{expected}`, got `{why}`");
    }
}

/// Runs one seed to the end, or says which promise broke in which step.
fn simulate<S: Schedule>(seed: u64, create: &mut dyn FnMut(Shape) -> S) -> Result<Summary, String> {
    let mut random = Random(seed);
    let batch_seqs_max = random.between(1, 6);
    let shape = Shape {
        block_tokens: random.between(1, 17),
        block_count: random.between(1, 40),
        batch_seqs_max,
        batch_tokens_max: batch_seqs_max + random.between(0, 30),
        queue_max: random.between(1, 8),
    };
    let mut world = World::new(shape, create(shape));
    let busy_turns = random.between(10, 60);
    for _ in 0..busy_turns {
        world.turn(&mut random, true)?;
    }
    while !world.lives.is_empty() {
        world.turn(&mut random, false)?;
    }
    let empty = Occupancy { blocks_free: shape.block_count, running: 0, waiting: 0 };
    check(world.schedule.occupancy() == empty, || format!("at the end: {:?}", world.schedule.occupancy()))?;
    check(!world.schedule.begin(&mut world.plan), || "a step without work".into())?;
    Ok(world.summary)
}

/// The driver and the checker: it makes the calls, and knows from them alone what must be true.
struct World<S> {
    shape: Shape,
    schedule: S,
    plan: Plan,
    left: Vec<(SeqId, SlotId)>,
    /// Everyone admitted who has not left.
    lives: BTreeMap<SeqId, Life>,
    /// Those of `lives` without a slot, in arrival order.
    queue: VecDeque<SeqId>,
    steps: u64,
    summary: Summary,
}

/// What the checker knows of a sequence.
struct Life {
    request: SeqRequest,
    slot: Option<SlotId>,
    computed: u32,
    outputs: u32,
    /// Blocks seen so far; a table only ever grows.
    table: Vec<BlockId>,
    cancelled_in_flight: bool,
    /// It must have left when `World::steps` is this.
    due_step: u64,
}

impl<S: Schedule> World<S> {
    fn new(shape: Shape, schedule: S) -> Self {
        Self {
            shape,
            schedule,
            plan: Plan::default(),
            left: Vec::new(),
            lives: BTreeMap::new(),
            queue: VecDeque::new(),
            steps: 0,
            summary: Summary::default(),
        }
    }

    /// One step with what happens before it and while it is on the device.
    fn turn(&mut self, random: &mut Random, busy: bool) -> Result<(), String> {
        self.calls(random, busy, false)?;
        if !self.schedule.begin(&mut self.plan) {
            return check(self.lives.is_empty(), || "no step although there is work".into());
        }
        self.steps += 1;
        self.summary.steps += 1;
        self.check_budget_and_order()?;
        self.check_starts()?;
        self.check_tables()?;
        self.check_occupancy()?;
        self.calls(random, busy, true)?;
        check(!self.schedule.begin(&mut Plan::default()), || "a second step in flight".into())?;
        self.end_step(random)
    }

    /// Random admissions and cancels.
    fn calls(&mut self, random: &mut Random, busy: bool, in_flight: bool) -> Result<(), String> {
        for _ in 0..if busy { random.between(0, 3) } else { 0 } {
            self.admit(random)?;
        }
        if random.one_in(4) {
            let nth = random.between(0, 20) as usize;
            // Often one that is there, sometimes one that has left: both must be safe.
            match self.lives.keys().nth(nth).copied() {
                Some(seq) => self.cancel(seq, in_flight)?,
                None => self.cancel_again()?,
            }
        }
        self.check_occupancy()
    }

    fn admit(&mut self, random: &mut Random) -> Result<(), String> {
        let request =
            SeqRequest { prompt_tokens: random.between(1, 60), output_tokens_max: random.between(1, 20) };
        // The last token is sampled and never computed on.
        let fits = blocks_for(self.shape, request) <= self.shape.block_count;
        let full = self.queue.len() as u32 >= self.shape.queue_max;
        match self.schedule.admit(request) {
            Ok(seq) => {
                check(fits && !full, || format!("{seq:?} admitted: fits {fits}, queue full {full}"))?;
                check(self.lives.keys().all(|older| *older < seq), || {
                    format!("{seq:?} is not a new number")
                })?;
                // Every step computes for this sequence or an older one, so their work bounds its stay.
                let work = |request: SeqRequest| u64::from(request.prompt_tokens + request.output_tokens_max);
                let ahead: u64 = self.lives.values().map(|life| work(life.request)).sum();
                let due_step = self.steps + ahead + work(request) + 1;
                let life = Life {
                    request,
                    slot: None,
                    computed: 0,
                    outputs: 0,
                    table: Vec::new(),
                    cancelled_in_flight: false,
                    due_step,
                };
                self.lives.insert(seq, life);
                self.queue.push_back(seq);
                self.summary.admitted += 1;
                Ok(())
            }
            Err(AdmitError::NeverFits) => {
                self.summary.never_fit += 1;
                check(!fits, || format!("{request:?} would fit {:?}", self.shape))
            }
            Err(AdmitError::QueueFull) => {
                self.summary.queue_full += 1;
                check(fits && full, || {
                    format!("queue full at {} of {}", self.queue.len(), self.shape.queue_max)
                })
            }
        }
    }

    fn cancel(&mut self, seq: SeqId, in_flight: bool) -> Result<(), String> {
        let life = &self.lives[&seq];
        let expected = match life.slot {
            None => Cancelled::FromQueue,
            Some(_) if in_flight => Cancelled::AtStepEnd,
            Some(slot) => Cancelled::FromSlot(slot),
        };
        let cancelled = self.schedule.cancel(seq);
        check(cancelled == expected, || format!("cancel({seq:?}): {cancelled:?}, expected {expected:?}"))?;
        if cancelled == Cancelled::AtStepEnd {
            self.lives.get_mut(&seq).expect("just read").cancelled_in_flight = true;
            self.summary.cancelled_in_flight += 1;
            return self.check_occupancy().map_err(|why| format!("{why}: freed under the device"));
        }
        self.lives.remove(&seq);
        self.queue.retain(|waiting| *waiting != seq);
        self.summary.cancelled_at_once += 1;
        Ok(())
    }

    /// Cancels one that has left.
    fn cancel_again(&mut self) -> Result<(), String> {
        let Some((seq, _)) = self.left.first().filter(|(seq, _)| !self.lives.contains_key(seq)) else {
            return Ok(());
        };
        let cancelled = self.schedule.cancel(*seq);
        check(cancelled == Cancelled::Unknown, || format!("cancel of one that left: {cancelled:?}"))
    }

    fn check_budget_and_order(&self) -> Result<(), String> {
        let plan = &self.plan;
        let tokens: u32 = plan.items.iter().map(|item| item.positions.len() as u32).sum();
        check(tokens == plan.tokens, || format!("{tokens} tokens, {} stated", plan.tokens))?;
        check((1..=self.shape.batch_tokens_max).contains(&tokens), || {
            format!("{tokens} tokens pass the budget")
        })?;

        let decodes: Vec<_> = self.decoding().collect();
        let decode_items = &plan.items[..decodes.len().min(plan.items.len())];
        let planned: Vec<_> = decode_items.iter().map(|item| item.seq).collect();
        check(planned == decodes, || {
            format!("not every finished prompt decodes: {planned:?} of {decodes:?}")
        })?;
        for item in decode_items {
            let at = self.lives[&item.seq].computed;
            check(item.positions == (at..at + 1) && item.samples, || format!("decode at {at}: {item:?}"))?;
        }

        let chunks = &plan.items[decodes.len()..];
        check(chunks.is_sorted_by(|a, b| a.seq < b.seq), || format!("chunks out of order: {chunks:?}"))?;
        for item in chunks {
            self.check_chunk(item)?;
        }
        // A prompt is cut only where the budget ends: all chunks but the last reach their prompt's end.
        let cut = chunks.iter().position(|item| !item.samples);
        check(cut.is_none_or(|at| at + 1 == chunks.len() && tokens == self.shape.batch_tokens_max), || {
            format!("a prompt is cut before the budget ends: {chunks:?}")
        })?;
        let oldest = self.prefilling().next();
        check(oldest.is_none_or(|seq| chunks.first().map(|item| item.seq) == Some(seq)), || {
            format!("the oldest unfinished prompt {oldest:?} is passed over")
        })
    }

    fn check_chunk(&self, item: &Item) -> Result<(), String> {
        let life = self.lives.get(&item.seq).ok_or_else(|| format!("{item:?} of nobody"))?;
        let prompt = life.request.prompt_tokens;
        let follows = item.positions.start == life.computed && !item.positions.is_empty();
        check(follows && item.positions.end <= prompt, || format!("{item:?} after {}", life.computed))?;
        check(item.samples == (item.positions.end == prompt), || format!("{item:?} of a prompt of {prompt}"))
    }

    /// Applies the plan's starts to the checker's own state.
    fn check_starts(&mut self) -> Result<(), String> {
        for &(seq, slot) in &self.plan.started {
            let head = self.queue.pop_front();
            check(head == Some(seq), || format!("{seq:?} overtakes the queue's head {head:?}"))?;
            let taken = self.lives.values().any(|life| life.slot == Some(slot));
            check(!taken && slot.0 < self.shape.batch_seqs_max, || format!("{seq:?} starts in {slot:?}"))?;
            self.lives.get_mut(&seq).expect("queued, so alive").slot = Some(slot);
            let planned = self.plan.items.iter().any(|item| item.seq == seq);
            check(planned, || format!("{seq:?} started without an item"))?;
        }
        for item in &self.plan.items {
            let slot = self.lives[&item.seq].slot;
            check(slot == Some(item.slot), || format!("{item:?}, but its slot is {slot:?}"))?;
        }
        // Work conserving: the head waits only for the budget, a slot or its blocks.
        let Some(head) = self.queue.front() else { return Ok(()) };
        let lacking = self.plan.tokens == self.shape.batch_tokens_max
            || self.running().count() as u32 == self.shape.batch_seqs_max
            || blocks_for(self.shape, self.lives[head].request) > self.blocks_free();
        check(lacking, || format!("{head:?} waits for nothing"))
    }

    fn check_tables(&mut self) -> Result<(), String> {
        for item in &self.plan.items {
            let table = &self.plan.block_tables[item.blocks.start as usize..item.blocks.end as usize];
            let covered = table.len() as u64 * u64::from(self.shape.block_tokens);
            check(covered >= u64::from(item.positions.end), || {
                format!("table does not cover the positions: {item:?}, {covered}")
            })?;
            let life = self.lives.get_mut(&item.seq).expect("checked above");
            let known = life.table.len().min(table.len());
            check(life.table[..known] == table[..known], || format!("{:?}'s table changed", item.seq))?;
            life.table.extend_from_slice(&table[known..]);
        }
        let mut owner = vec![None; self.shape.block_count as usize];
        for (seq, life) in &self.lives {
            for block in &life.table {
                let entry =
                    owner.get_mut(block.0 as usize).ok_or_else(|| format!("no such block: {block:?}"))?;
                check(entry.is_none(), || {
                    format!("{block:?} is held by two sequences, {entry:?} and {seq:?}")
                })?;
                *entry = Some(*seq);
            }
        }
        Ok(())
    }

    fn check_occupancy(&self) -> Result<(), String> {
        let occupancy = self.schedule.occupancy();
        let expected = Occupancy {
            blocks_free: self.blocks_free(),
            running: self.running().count() as u32,
            waiting: self.queue.len() as u32,
        };
        check(occupancy == expected, || format!("{occupancy:?}, expected {expected:?}"))
    }

    fn end_step(&mut self, random: &mut Random) -> Result<(), String> {
        let mut outcomes = Vec::new();
        let mut ends: Vec<_> =
            self.lives.iter().filter(|(_, l)| l.cancelled_in_flight).map(|(s, _)| *s).collect();
        for item in &self.plan.items {
            let life = self.lives.get_mut(&item.seq).expect("checked at begin");
            life.computed = item.positions.end;
            if !item.samples {
                outcomes.push(Outcome::Chunk);
                continue;
            }
            life.outputs += 1;
            let stops = random.one_in(12);
            // At the length limit the planner ends it by itself.
            let ended = stops || life.outputs == life.request.output_tokens_max;
            outcomes.push(if stops { Outcome::Last } else { Outcome::Token });
            if ended && !life.cancelled_in_flight {
                ends.push(item.seq);
                self.summary.ended += 1;
            }
        }
        ends.sort_unstable();
        self.schedule.end(&self.plan, &outcomes, &mut self.left);
        let expected: Vec<_> =
            ends.iter().map(|seq| (*seq, self.lives[seq].slot.expect("it ran, so it has a slot"))).collect();
        check(self.left == expected, || {
            format!("left is not who ended or was cancelled: {:?}, {expected:?}", self.left)
        })?;
        for seq in ends {
            self.lives.remove(&seq);
        }
        let late = self.lives.iter().find(|(_, life)| self.steps >= life.due_step);
        check(late.is_none(), || format!("{:?} starves", late.map(|(seq, _)| seq)))?;
        self.check_occupancy()
    }

    fn blocks_free(&self) -> u32 {
        let held: u32 = self.running().map(|(_, life)| blocks_for(self.shape, life.request)).sum();
        self.shape.block_count.wrapping_sub(held)
    }

    fn running(&self) -> impl Iterator<Item = (SeqId, &Life)> {
        self.lives.iter().filter(|(_, life)| life.slot.is_some()).map(|(seq, life)| (*seq, life))
    }

    fn decoding(&self) -> impl Iterator<Item = SeqId> {
        self.running().filter(|(_, life)| life.computed >= life.request.prompt_tokens).map(|(seq, _)| seq)
    }

    fn prefilling(&self) -> impl Iterator<Item = SeqId> {
        self.running().filter(|(_, life)| life.computed < life.request.prompt_tokens).map(|(seq, _)| seq)
    }
}

/// The planner's calls, so that mutants can stand in for it. The step token stays inside.
trait Schedule {
    fn admit(&mut self, request: SeqRequest) -> Result<SeqId, AdmitError>;
    fn begin(&mut self, plan: &mut Plan) -> bool;
    fn end(&mut self, plan: &Plan, outcomes: &[Outcome], left: &mut Vec<(SeqId, SlotId)>);
    fn cancel(&mut self, seq: SeqId) -> Cancelled;
    fn occupancy(&self) -> Occupancy;
}

struct Real {
    planner: Planner,
    step: Option<Step>,
}

impl Schedule for Real {
    fn admit(&mut self, request: SeqRequest) -> Result<SeqId, AdmitError> {
        self.planner.admit(request)
    }

    fn begin(&mut self, plan: &mut Plan) -> bool {
        let step = self.planner.begin_step(plan);
        let begun = step.is_some();
        self.step = self.step.take().or(step);
        begun
    }

    fn end(&mut self, plan: &Plan, outcomes: &[Outcome], left: &mut Vec<(SeqId, SlotId)>) {
        let step = self.step.take().expect("a step is in flight");
        self.planner.end_step(step, plan, outcomes, left);
    }

    fn cancel(&mut self, seq: SeqId) -> Cancelled {
        self.planner.cancel(seq)
    }

    fn occupancy(&self) -> Occupancy {
        self.planner.occupancy()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    ForgetsCancel,
    FreesAtCancel,
    Overtakes,
    PassesBudget,
    SharesBlock,
    ShortTable,
    SkipsDecode,
}

/// A planner with one bug. It keeps the true plan to itself and shows a spoilt copy.
struct Mutant {
    real: Real,
    plan: Plan,
    bug: Bug,
}

impl Mutant {
    fn new(shape: Shape, bug: Bug) -> Self {
        let budget = shape.batch_tokens_max + u32::from(bug == Bug::PassesBudget);
        let planner = planner(Shape { batch_tokens_max: budget, ..shape });
        Self { real: Real { planner, step: None }, plan: Plan::default(), bug }
    }

    fn spoil(&self, plan: &mut Plan) {
        let decodes = plan.items.iter().filter(|item| item.positions.start > 0 && item.samples).count();
        match self.bug {
            Bug::Overtakes if plan.started.len() > 1 => {
                let (seq, _) = plan.started.remove(0);
                plan.items.retain(|item| item.seq != seq);
            }
            Bug::SharesBlock if plan.items.len() > 1 => {
                plan.block_tables[plan.items[1].blocks.start as usize] = plan.block_tables[0];
            }
            Bug::ShortTable => plan.items[0].blocks.end -= 1,
            Bug::SkipsDecode if decodes > 1 => drop(plan.items.remove(0)),
            Bug::ForgetsCancel
            | Bug::FreesAtCancel
            | Bug::Overtakes
            | Bug::PassesBudget
            | Bug::SharesBlock
            | Bug::SkipsDecode => {}
        }
        plan.tokens = plan.items.iter().map(|item| item.positions.len() as u32).sum();
    }
}

impl Schedule for Mutant {
    fn admit(&mut self, request: SeqRequest) -> Result<SeqId, AdmitError> {
        self.real.admit(request)
    }

    fn begin(&mut self, plan: &mut Plan) -> bool {
        // The true plan belongs to the step in flight.
        if self.real.step.is_some() || !self.real.begin(&mut self.plan) {
            return false;
        }
        plan.items.clone_from(&self.plan.items);
        plan.block_tables.clone_from(&self.plan.block_tables);
        plan.started.clone_from(&self.plan.started);
        self.spoil(plan);
        true
    }

    fn end(&mut self, _: &Plan, outcomes: &[Outcome], left: &mut Vec<(SeqId, SlotId)>) {
        if self.real.step.is_some() {
            self.real.end(&self.plan, outcomes, left);
        }
    }

    fn cancel(&mut self, seq: SeqId) -> Cancelled {
        let running = self.plan.items.iter().any(|item| item.seq == seq);
        if self.real.step.is_none() || !running {
            return self.real.cancel(seq);
        }
        if self.bug == Bug::ForgetsCancel {
            return Cancelled::AtStepEnd;
        }
        let cancelled = self.real.cancel(seq);
        if self.bug == Bug::FreesAtCancel {
            let token = |item: &Item| if item.samples { Outcome::Token } else { Outcome::Chunk };
            let outcomes: Vec<_> = self.plan.items.iter().map(token).collect();
            self.real.end(&self.plan, &outcomes, &mut Vec::new());
        }
        cancelled
    }

    fn occupancy(&self) -> Occupancy {
        self.real.occupancy()
    }
}

/// How often each thing happened.
#[derive(Clone, Copy, Debug, Default)]
struct Summary {
    steps: u64,
    admitted: u64,
    ended: u64,
    cancelled_at_once: u64,
    cancelled_in_flight: u64,
    never_fit: u64,
    queue_full: u64,
}

impl Summary {
    fn add(&mut self, other: Self) {
        self.steps += other.steps;
        self.admitted += other.admitted;
        self.ended += other.ended;
        self.cancelled_at_once += other.cancelled_at_once;
        self.cancelled_in_flight += other.cancelled_in_flight;
        self.never_fit += other.never_fit;
        self.queue_full += other.queue_full;
    }

    /// The count of what happened least.
    fn least(&self) -> u64 {
        let Self { steps, admitted, ended, cancelled_at_once, cancelled_in_flight, never_fit, queue_full } =
            *self;
        let counts = [steps, admitted, ended, cancelled_at_once, cancelled_in_flight, never_fit, queue_full];
        counts.into_iter().min().unwrap_or(0)
    }
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Both ends included.
    fn between(&mut self, low: u32, high: u32) -> u32 {
        low + (self.next() % u64::from(high - low + 1)) as u32
    }

    fn one_in(&mut self, count: u32) -> bool {
        self.between(1, count) == 1
    }
}

/// Names the seed where the planner's own assertions fail.
struct NameSeedOnPanic(u64);

impl Drop for NameSeedOnPanic {
    #[expect(clippy::print_stderr, reason = "a test's message to the person who reads its failure")]
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("seed {}: run again with PLANNER_SEED={}", self.0, self.0);
        }
    }
}

fn planner(shape: Shape) -> Planner {
    Planner::new(shape).expect("the simulation draws valid shapes")
}

fn blocks_for(shape: Shape, request: SeqRequest) -> u32 {
    (request.prompt_tokens + request.output_tokens_max - 1).div_ceil(shape.block_tokens)
}

fn check(holds: bool, why: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(why()) }
}
