use alloc::string::ToString;
use alloc::vec;

use super::*;

#[test]
fn a_shape_is_checked_on_both_sides_of_each_limit() {
    let out_of_range = |field, value, max| Err(InvalidShape::OutOfRange { field, value, max });
    let below = |batch_tokens_max, batch_seqs_max| {
        Err(InvalidShape::BudgetBelowBatch { batch_tokens_max, batch_seqs_max })
    };
    let rows = [
        ("ordinary", SHAPE, Ok(())),
        (
            "no tokens in a block",
            Shape { block_tokens: 0, ..SHAPE },
            out_of_range("block_tokens", 0, u32::MAX),
        ),
        ("no blocks", Shape { block_count: 0, ..SHAPE }, out_of_range("block_count", 0, BLOCK_COUNT_MAX)),
        ("one block", Shape { block_count: 1, ..SHAPE }, Ok(())),
        (
            "too many blocks",
            Shape { block_count: BLOCK_COUNT_MAX + 1, block_tokens: 1, ..SHAPE },
            out_of_range("block_count", BLOCK_COUNT_MAX + 1, BLOCK_COUNT_MAX),
        ),
        ("no batch", Shape { batch_seqs_max: 0, ..SHAPE }, out_of_range("batch_seqs_max", 0, BATCH_SEQS_MAX)),
        ("most", Shape { batch_seqs_max: BATCH_SEQS_MAX, batch_tokens_max: BATCH_SEQS_MAX, ..SHAPE }, Ok(())),
        (
            "batch too large",
            Shape { batch_seqs_max: BATCH_SEQS_MAX + 1, batch_tokens_max: u32::MAX, ..SHAPE },
            out_of_range("batch_seqs_max", BATCH_SEQS_MAX + 1, BATCH_SEQS_MAX),
        ),
        ("no queue", Shape { queue_max: 0, ..SHAPE }, out_of_range("queue_max", 0, QUEUE_MAX)),
        ("longest queue", Shape { queue_max: QUEUE_MAX, ..SHAPE }, Ok(())),
        (
            "long queue",
            Shape { queue_max: QUEUE_MAX + 1, ..SHAPE },
            out_of_range("queue_max", QUEUE_MAX + 1, QUEUE_MAX),
        ),
        ("budget of one token each", Shape { batch_tokens_max: 3, ..SHAPE }, Ok(())),
        ("budget below the batch", Shape { batch_tokens_max: 2, ..SHAPE }, below(2, 3)),
        ("cache of u32::MAX tokens", Shape { block_tokens: u32::MAX / 5, block_count: 5, ..SHAPE }, Ok(())),
        (
            "cache above u32::MAX tokens",
            Shape { block_tokens: 1 << 31, block_count: 2, ..SHAPE },
            Err(InvalidShape::CacheTooLarge),
        ),
    ];
    for (name, shape, expected) in rows {
        assert_eq!(Planner::new(shape).map(|_| ()), expected, "{name}");
    }
    assert_eq!(
        below(2, 3).unwrap_err().to_string(),
        "batch_tokens_max is 2, below batch_seqs_max, which is 3"
    );
}

#[test]
fn a_request_needs_blocks_for_all_but_its_last_token() {
    let rows = [
        ("one and one", 1, 1, Some(1)),
        ("exactly a block", 3, 2, Some(1)),
        ("one more", 4, 2, Some(2)),
        ("prompt fills a block, one token out", 4, 1, Some(1)),
        ("no prompt", 0, 1, None),
        ("no output", 1, 0, None),
        ("longest", u32::MAX, 1, Some(1 << 30)),
        ("past u32", u32::MAX, 2, None),
    ];
    for (name, prompt_tokens, output_tokens_max, expected) in rows {
        let request = SeqRequest { prompt_tokens, output_tokens_max };
        assert_eq!(SHAPE.blocks_for(request), expected, "{name}");
    }
}

#[test]
fn admission_refuses_what_never_fits_and_what_the_queue_cannot_hold() {
    let mut planner = Planner::new(SHAPE).unwrap();
    // The cache holds 8 blocks of 4.
    assert_eq!(planner.admit(request(32, 2)), Err(AdmitError::NeverFits));
    assert_eq!(planner.admit(request(0, 2)), Err(AdmitError::NeverFits));
    assert_eq!(planner.admit(request(32, 1)).map(SeqId::get), Ok(1));
    assert_eq!(planner.admit(request(1, 1)).map(SeqId::get), Ok(2));
    assert_eq!(planner.admit(request(1, 1)), Err(AdmitError::QueueFull));
    assert_eq!(planner.admit(request(32, 2)), Err(AdmitError::NeverFits), "whatever the load is");
}

#[test]
fn decode_goes_first_and_the_head_waits_for_its_blocks_without_being_overtaken() {
    let mut planner = Planner::new(Shape { queue_max: 4, ..SHAPE }).unwrap();
    let mut plan = Plan::default();
    let mut left = Vec::new();
    let first = planner.admit(request(4, 3)).unwrap();
    let second = planner.admit(request(12, 1)).unwrap();
    let large = planner.admit(request(20, 1)).unwrap();
    let small = planner.admit(request(1, 1)).unwrap();

    // Budget 10: the whole first prompt and half of the second. 5 of 8 blocks are taken, so `large` does not fit,
    // and `small`, which would, waits behind it.
    let step = planner.begin_step(&mut plan).unwrap();
    assert_eq!(work(&plan), [(first, 0..4, true), (second, 0..6, false)]);
    assert_eq!(plan.started, [(first, SlotId(0)), (second, SlotId(1))]);
    assert_eq!(plan.block_tables, [0, 2, 3].map(BlockId), "only the blocks of computed positions");
    assert_eq!(planner.occupancy(), Occupancy { blocks_free: 3, running: 2, waiting: 2 });
    planner.end_step(step, &plan, &[Outcome::Token, Outcome::Chunk], &mut left);
    assert_eq!(left, []);

    let step = planner.begin_step(&mut plan).unwrap();
    assert_eq!(work(&plan), [(first, 4..5, true), (second, 6..12, true)]);
    planner.end_step(step, &plan, &[Outcome::Token, Outcome::Token], &mut left);
    assert_eq!(left, [(second, SlotId(1))], "its only token, whatever the outcome says");

    let step = planner.begin_step(&mut plan).unwrap();
    assert_eq!(work(&plan), [(first, 5..6, true), (large, 0..9, false)]);
    planner.end_step(step, &plan, &[Outcome::Last, Outcome::Chunk], &mut left);
    assert_eq!(left, [(first, SlotId(0))]);

    let step = planner.begin_step(&mut plan).unwrap();
    assert_eq!(work(&plan), [(large, 9..19, false)]);
    planner.end_step(step, &plan, &[Outcome::Chunk], &mut left);

    let step = planner.begin_step(&mut plan).unwrap();
    assert_eq!(work(&plan), [(large, 19..20, true), (small, 0..1, true)]);
    planner.end_step(step, &plan, &[Outcome::Token, Outcome::Token], &mut left);
    assert_eq!(left.len(), 2);
    assert_eq!(planner.begin_step(&mut plan), None);
    assert_eq!(planner.occupancy(), Occupancy { blocks_free: 8, running: 0, waiting: 0 });
}

#[test]
fn a_cancel_frees_nothing_that_a_step_uses() {
    let mut planner = Planner::new(SHAPE).unwrap();
    let (mut plan, mut left) = (Plan::default(), Vec::new());
    let runs = planner.admit(request(4, 8)).unwrap();
    let step = planner.begin_step(&mut plan).unwrap();
    let waits = planner.admit(request(4, 8)).unwrap();
    assert_eq!(planner.cancel(waits), Cancelled::FromQueue);
    assert_eq!(planner.cancel(waits), Cancelled::Unknown);
    assert_eq!(planner.cancel(runs), Cancelled::AtStepEnd);
    assert_eq!(planner.cancel(runs), Cancelled::AtStepEnd, "twice is once");
    assert_eq!(planner.occupancy(), Occupancy { blocks_free: 5, running: 1, waiting: 0 });
    // Whatever the device made of it, even what could not be.
    planner.end_step(step, &plan, &[Outcome::Chunk], &mut left);
    assert_eq!(left, [(runs, SlotId(0))]);
    assert_eq!(planner.occupancy(), Occupancy { blocks_free: 8, running: 0, waiting: 0 });
    assert_eq!(planner.cancel(runs), Cancelled::Unknown);
}

#[test]
fn a_cancel_between_steps_frees_at_once_and_keeps_the_others_tables() {
    let mut planner = Planner::new(Shape { queue_max: 3, ..SHAPE }).unwrap();
    let (mut plan, mut left) = (Plan::default(), Vec::new());
    let seqs = [(); 3].map(|()| planner.admit(request(3, 5)).unwrap());
    let step = planner.begin_step(&mut plan).unwrap();
    planner.end_step(step, &plan, &[Outcome::Token; 3], &mut left);
    assert_eq!(planner.cancel(seqs[1]), Cancelled::FromSlot(SlotId(1)));
    assert_eq!(planner.occupancy(), Occupancy { blocks_free: 4, running: 2, waiting: 0 });
    // Positions 3..4, then 4..5 with the second block.
    for expected in [vec![0, 4], vec![0, 1, 4, 5]] {
        let step = planner.begin_step(&mut plan).unwrap();
        assert_eq!(plan.block_tables.iter().map(|block| block.0).collect::<Vec<_>>(), expected);
        planner.end_step(step, &plan, &[Outcome::Token; 2], &mut left);
    }
}

#[test]
fn no_table_grows_past_its_size_at_start() {
    let mut planner = Planner::new(SHAPE).unwrap();
    let capacities = |planner: &Planner| {
        (
            planner.waiting.capacity(),
            planner.running.capacity(),
            planner.slots_free.capacity(),
            planner.blocks.capacities(),
        )
    };
    let at_start = capacities(&planner);
    let (mut plan, mut left) = (Plan::default(), Vec::new());
    for round in 0..50 {
        while planner.admit(request(1 + round % 7, 1 + round % 5)).is_ok() {}
        if let Some(step) = planner.begin_step(&mut plan) {
            let token = |item: &Item| if item.samples { Outcome::Token } else { Outcome::Chunk };
            let outcomes: Vec<_> = plan.items.iter().map(token).collect();
            planner.end_step(step, &plan, &outcomes, &mut left);
        }
        assert_eq!(capacities(&planner), at_start);
    }
}

#[test]
#[should_panic(expected = "a token exactly where the item samples")]
fn an_outcome_that_contradicts_the_plan_is_a_bug() {
    let mut planner = Planner::new(SHAPE).unwrap();
    let mut plan = Plan::default();
    planner.admit(request(20, 1)).unwrap();
    let step = planner.begin_step(&mut plan).unwrap();
    planner.end_step(step, &plan, &[Outcome::Token], &mut Vec::new());
}

#[test]
#[should_panic(expected = "the step that ends is the one in flight")]
fn a_step_of_another_planner_is_a_bug() {
    let mut plan = Plan::default();
    let [mut one, mut other] = [(); 2].map(|()| Planner::new(SHAPE).unwrap());
    one.admit(request(1, 1)).unwrap();
    let step = one.begin_step(&mut plan).unwrap();
    other.end_step(step, &plan, &[Outcome::Token], &mut Vec::new());
}

fn request(prompt_tokens: u32, output_tokens_max: u32) -> SeqRequest {
    SeqRequest { prompt_tokens, output_tokens_max }
}

fn work(plan: &Plan) -> Vec<(SeqId, Range<u32>, bool)> {
    plan.items.iter().map(|item| (item.seq, item.positions.clone(), item.samples)).collect()
}

const SHAPE: Shape =
    Shape { block_tokens: 4, block_count: 8, batch_seqs_max: 3, batch_tokens_max: 10, queue_max: 2 };
