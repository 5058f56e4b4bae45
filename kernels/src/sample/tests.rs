use super::*;

#[test]
fn greedy_takes_the_best_and_the_lowest_id_among_equals() {
    const NAN: f32 = f32::NAN;
    const INF: f32 = f32::INFINITY;
    let mut last_of_many = vec![0.0; 1000];
    last_of_many[999] = 1.0;
    let mut twice = vec![-1.0; 1000];
    (twice[70], twice[71], twice[900]) = (3.0, 3.0, 3.0);
    let rows: [(&str, Vec<f32>, u32); 12] = [
        ("one", vec![-5.0], 0),
        ("first", vec![2.0, 1.0, 0.0], 0),
        ("tie", vec![0.0, 1.0, 1.0], 1),
        ("zeros of both signs are equal", vec![-0.0, 0.0], 0),
        ("the last of many", last_of_many, 999),
        ("a tie in one chunk and in two", twice, 70),
        ("NaN is no candidate", vec![NAN, -3.0, NAN, -2.0], 3),
        ("minus infinity is none", vec![-INF, -INF, f32::MIN], 2),
        ("plus infinity wins", vec![0.0, INF, INF], 1),
        ("nothing but NaN", vec![NAN; 100], 0),
        ("nothing but minus infinity", vec![-INF; 100], 0),
        ("no logits", vec![], 0),
    ];
    for (name, mut logits, expected) in rows {
        let mut sampler = Sampler::new(SamplingParams::greedy(), &[]);
        assert_eq!(sampler.choose(&mut logits), expected, "{name}");
        assert_eq!(sampler.output_tokens(), 1, "{name}");
    }
}

#[test]
fn every_parameter_at_its_ends() {
    let drawn = SamplingParams { temperature: 1.0, seed: 7, ..SamplingParams::greedy() };
    let flat = vec![0.0f32; 200];
    let peaked: Vec<f32> = (0..200).map(|id| if id == 150 { 9.0 } else { -(id as f32) }).collect();
    // Which ids may come out of 400 seeds, and how many of them must.
    type Row = (&'static str, SamplingParams, Vec<f32>, fn(u32) -> bool, usize);
    let rows: [Row; 14] = [
        ("no cut reaches all", drawn.clone(), flat.clone(), |_| true, 150),
        ("top_k 1 is greedy", with(&drawn, |p| p.top_k = Some(1)), peaked.clone(), |id| id == 150, 1),
        (
            "top_k 1 of equals is the lowest",
            with(&drawn, |p| p.top_k = Some(1)),
            flat.clone(),
            |id| id == 0,
            1,
        ),
        ("top_k 5 of equals", with(&drawn, |p| p.top_k = Some(5)), flat.clone(), |id| id < 5, 5),
        ("top_k of all but one", with(&drawn, |p| p.top_k = Some(199)), flat.clone(), |id| id < 199, 150),
        ("top_k of all is off", with(&drawn, |p| p.top_k = Some(200)), flat.clone(), |_| true, 150),
        (
            "top_p next to 0 is greedy",
            with(&drawn, |p| p.top_p = f32::MIN_POSITIVE),
            flat.clone(),
            |id| id == 0,
            1,
        ),
        ("top_p of half", with(&drawn, |p| p.top_p = 0.5), flat.clone(), |id| id < 100, 80),
        (
            "top_p after top_k",
            with(&drawn, |p| (p.top_p, p.top_k) = (0.5, Some(10))),
            flat.clone(),
            |id| id < 5,
            5,
        ),
        ("min_p 1 keeps the equals", with(&drawn, |p| p.min_p = 1.0), flat.clone(), |_| true, 150),
        ("min_p 1 keeps the best", with(&drawn, |p| p.min_p = 1.0), peaked.clone(), |id| id == 150, 1),
        ("temperature next to 0", with(&drawn, |p| p.temperature = 1e-45), peaked.clone(), |id| id == 150, 1),
        (
            "temperature 2",
            with(&drawn, |p| p.temperature = 2.0),
            peaked.clone(),
            |id| id < 40 || id == 150,
            3,
        ),
        (
            "infinities share",
            drawn.clone(),
            peaked.iter().enumerate().map(|(id, x)| if id % 50 == 3 { f32::INFINITY } else { *x }).collect(),
            |id| id % 50 == 3,
            4,
        ),
    ];
    for (name, params, logits, allowed, least) in rows {
        let mut reached = std::collections::BTreeSet::new();
        for seed in 0..400 {
            let mut sampler = Sampler::new(SamplingParams { seed, ..params.clone() }, &[]);
            let token = sampler.choose(&mut logits.clone());
            assert!(allowed(token), "{name}: {token}");
            reached.insert(token);
        }
        assert!(reached.len() >= least, "{name}: reached {reached:?}");
    }
}

#[test]
fn bias_bans_and_penalties_act_on_the_logit() {
    let greedy = SamplingParams::greedy();
    let rows = [
        ("bias lifts", with(&greedy, |p| p.logit_bias = vec![(2, 1.5)]), vec![1.0, 2.0, 1.0], 2),
        ("bias of 100 selects", with(&greedy, |p| p.logit_bias = vec![(0, 100.0)]), vec![-40.0, 30.0], 0),
        ("bias of -100 excludes", with(&greedy, |p| p.logit_bias = vec![(1, -100.0)]), vec![-40.0, 30.0], 0),
        (
            "bias outside the vocabulary",
            with(&greedy, |p| p.logit_bias = vec![(9, 100.0)]),
            vec![0.0, 1.0],
            1,
        ),
        ("repetition divides above 0", with(&greedy, |p| p.repetition_penalty = 2.0), vec![1.9, 1.0, 0.0], 1),
        (
            "repetition multiplies below 0",
            with(&greedy, |p| p.repetition_penalty = 2.0),
            vec![-1.0, -1.9, -4.0],
            1,
        ),
        ("repetition below 1 favours", with(&greedy, |p| p.repetition_penalty = 0.5), vec![1.1, 2.0, 0.0], 0),
        (
            "presence leaves the prompt alone",
            with(&greedy, |p| p.presence_penalty = 2.0),
            vec![1.0, 0.0, 0.0],
            0,
        ),
    ];
    for (name, params, mut logits, expected) in rows {
        assert_eq!(Sampler::new(params, &[0, 0]).choose(&mut logits), expected, "{name}");
    }
    for (name, params, expected) in [
        ("presence is subtracted once", with(&greedy, |p| p.presence_penalty = 1.5), [0, 1, 0, 0, 0]),
        ("frequency each time", with(&greedy, |p| p.frequency_penalty = 1.0), [0, 1, 0, 1, 0]),
        ("a negative one favours", with(&greedy, |p| p.frequency_penalty = -1.0), [0, 0, 0, 0, 0]),
        ("the output counts for repetition", with(&greedy, |p| p.repetition_penalty = 1.3), [0, 1, 0, 0, 0]),
    ] {
        let mut sampler = Sampler::new(params, &[]);
        assert_eq!([(); 5].map(|()| sampler.choose(&mut [4.0, 3.5, -9.0])), expected, "{name}");
    }
}

#[test]
fn min_tokens_bans_up_to_itself_and_no_longer() {
    for (name, min_tokens, expected) in
        [("off", 0, [1, 1, 1]), ("two", 2, [0, 0, 1]), ("for ever", u32::MAX, [0; 3])]
    {
        for temperature in [0.0, 0.1] {
            let params = SamplingParams {
                temperature,
                min_tokens,
                banned_until_min: vec![1, 7],
                ..SamplingParams::greedy()
            };
            let mut sampler = Sampler::new(params, &[]);
            let tokens = [(); 3].map(|()| {
                let banned = sampler.is_banned(1);
                let token = sampler.choose(&mut [0.0, 50.0]);
                assert_eq!(banned, token != 1, "{name}");
                token
            });
            assert_eq!(tokens, expected, "{name}, temperature {temperature}");
        }
    }
    let params = SamplingParams { min_tokens: 1, banned_until_min: vec![0, 1], ..SamplingParams::greedy() };
    let chosen = Sampler::new(params, &[]).choose(&mut [1.0, f32::NAN, f32::NAN]);
    assert_eq!(chosen, 2, "what is banned is not the way out either");
}

#[test]
fn a_draw_depends_on_seed_and_index_only() {
    let logits: Vec<f32> = (0..500).map(|id| (id % 13) as f32 * 0.3).collect();
    let params = SamplingParams { temperature: 1.0, seed: 42, ..SamplingParams::greedy() };
    let mut sampler = Sampler::new(params.clone(), &[1, 2, 3]);
    let run: Vec<_> = (0..20).map(|_| sampler.choose(&mut logits.clone())).collect();
    let mut resumed = Sampler::new(params.clone(), &[]);
    run[..10].iter().for_each(|token| resumed.count(*token));
    let rest: Vec<_> = (10..20).map(|_| resumed.choose(&mut logits.clone())).collect();
    assert_eq!(rest, run[10..], "resumed in the middle");
    let mut other = Sampler::new(SamplingParams { seed: 43, ..params }, &[]);
    let other: Vec<_> = (0..20).map(|_| other.choose(&mut logits.clone())).collect();
    assert!(run.iter().zip(&other).filter(|(a, b)| a == b).count() < 5, "the next seed is another stream");
}

#[test]
fn draws_follow_the_distribution() {
    // Weights 1, 2, 3, 4 of 10, once in one chunk and once spread over several.
    for (name, stride) in [("one chunk", 1), ("several", 150)] {
        for (cut, top_k, top_p) in [("all", None, 1.0), ("top_k", Some(4), 1.0), ("top_p", None, 0.999_999)] {
            let mut logits = vec![f32::NEG_INFINITY; 4 * stride + 1];
            (0..4).for_each(|nth| logits[nth * stride] = ((nth + 1) as f32).ln());
            let params = SamplingParams { temperature: 1.0, top_k, top_p, ..SamplingParams::greedy() };
            let mut counts = [0.0f64; 4];
            const DRAWS: u64 = 20_000;
            for seed in 0..DRAWS {
                let mut sampler = Sampler::new(SamplingParams { seed, ..params.clone() }, &[]);
                counts[sampler.choose(&mut logits.clone()) as usize / stride] += 1.0;
            }
            let chi_square: f64 = (0..4)
                .map(|nth| {
                    let expected = DRAWS as f64 * (nth + 1) as f64 / 10.0;
                    (counts[nth] - expected).powi(2) / expected
                })
                .sum();
            // 99.9 % quantile for three degrees of freedom.
            assert!(chi_square < 16.27, "{name}, {cut}: {counts:?}, chi square {chi_square}");
        }
    }
}

#[test]
fn every_choice_is_the_naive_one() {
    let mut random = 0u64;
    let mut between = |low: f32, high: f32| {
        random += 1;
        low + (high - low) * unit_random(99, random as u32) as f32
    };
    let mut drawn = 0;
    for round in 0..3_000u32 {
        let vocab = [1, 2, 63, 64, 65, 300, 1000, 4999][round as usize % 8];
        let spread = [0.0, 1.0, 4.0, 30.0][round as usize / 8 % 4];
        let mut maybe = |off: f32, low, high| if between(0.0, 1.0) < 0.5 { off } else { between(low, high) };
        let params = SamplingParams {
            temperature: maybe(1.0, 0.0, 2.0),
            top_p: maybe(1.0, 0.001, 1.0),
            top_k: Some(maybe(0.0, 1.0, vocab as f32 + 5.0) as u32).filter(|k| *k > 0),
            min_p: maybe(0.0, 0.0, 1.0),
            presence_penalty: maybe(0.0, -2.0, 2.0),
            frequency_penalty: maybe(0.0, -2.0, 2.0),
            repetition_penalty: maybe(1.0, 0.1, 2.0),
            logit_bias: vec![(0, maybe(0.0, -100.0, 100.0)), (5, maybe(0.0, -3.0, 3.0))],
            seed: u64::from(round),
            min_tokens: 2,
            banned_until_min: vec![vocab - 1],
        };
        let mut token = || between(0.0, vocab as f32) as u32;
        let prompt = [(); 6].map(|()| token());
        let mut sampler = Sampler::new(params.clone(), &prompt);
        let mut output = Vec::new();
        for _ in 0..4 {
            // Whole steps, so that there are ties.
            let logits: Vec<f32> =
                (0..vocab).map(|_| (between(-spread, spread) * 8.0).round() / 8.0).collect();
            let expected = naive(&params, &prompt, &output, &logits);
            let chosen = sampler.choose(&mut logits.clone());
            assert_eq!(chosen, expected, "round {round}, output {}, {params:?}", output.len());
            output.push(chosen);
            drawn += 1;
        }
    }
    assert_eq!(drawn, 12_000);
}

#[test]
fn tables_keep_the_size_they_got_first() {
    let params = SamplingParams {
        temperature: 1.0,
        top_p: 0.9,
        top_k: Some(50),
        frequency_penalty: 0.1,
        ..SamplingParams::greedy()
    };
    let mut sampler = Sampler::new(params, &[]);
    sampler.reserve_output(200);
    let mut warm = None;
    for index in 0..200 {
        let mut logits: Vec<f32> = (0..3000).map(|id| unit_random(index, id) as f32).collect();
        sampler.choose(&mut logits);
        let capacities =
            (sampler.seen.capacity(), sampler.candidates.capacity(), sampler.chunk_maxima.capacity());
        assert_eq!(*warm.get_or_insert(capacities), capacities);
    }
    let mut plain = Sampler::new(SamplingParams::greedy(), &[1, 2, 3]);
    plain.reserve_output(200);
    plain.choose(&mut [1.0; 3000]);
    assert_eq!((plain.seen.capacity(), plain.candidates.capacity()), (0, 0), "what is off takes no memory");
}

#[test]
fn the_exponential_is_within_its_bound() {
    let mut worst = 0.0f64;
    for step in 0..=870_000 {
        let x = step as f32 * -1e-4;
        let exact = f64::from(x).exp();
        worst = worst.max((f64::from(exp_negative(x)) - exact).abs() / exact);
    }
    assert!(worst < 3e-7, "{worst}");
    assert_eq!([0.0, -0.0].map(exp_negative), [1.0, 1.0]);
    assert!(exp_negative(-87.0) > 0.0);
    assert_eq!([-87.001, -1e30, f32::NEG_INFINITY, f32::NAN].map(exp_negative), [0.0; 4]);
}

/// The order of operations in plain f64, with one full sort.
fn naive(params: &SamplingParams, prompt: &[u32], output: &[u32], logits: &[f32]) -> u32 {
    // Steps 1 to 3 in f32, as ties there decide.
    let mut logits = logits.to_vec();
    for &(token, bias) in &params.logit_bias {
        if (token as usize) < logits.len() {
            logits[token as usize] += bias;
        }
    }
    if (output.len() as u32) < params.min_tokens {
        params.banned_until_min.iter().for_each(|token| logits[*token as usize] = f32::NEG_INFINITY);
    }
    for (id, logit) in logits.iter_mut().enumerate() {
        let count = output.iter().filter(|token| **token as usize == id).count();
        if count > 0 || prompt.contains(&(id as u32)) {
            let penalty = params.repetition_penalty;
            *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
        }
        if count > 0 {
            *logit -= params.frequency_penalty * count as f32 + params.presence_penalty;
        }
    }
    let mut order: Vec<usize> = (0..logits.len()).filter(|id| logits[*id] > f32::NEG_INFINITY).collect();
    order.sort_by(|a, b| logits[*b].partial_cmp(&logits[*a]).unwrap().then(a.cmp(b)));
    let Some(&best) = order.first() else {
        let banned =
            |id: &u32| (output.len() as u32) < params.min_tokens && params.banned_until_min.contains(id);
        return (0..).find(|id| !banned(id)).unwrap();
    };
    if params.temperature == 0.0 {
        return best as u32;
    }
    order.truncate(params.top_k.map_or(usize::MAX, |k| k as usize));
    let weight =
        |id: usize| ((f64::from(logits[id]) - f64::from(logits[best])) / f64::from(params.temperature)).exp();
    if params.top_p < 1.0 {
        let target = f64::from(params.top_p) * order.iter().map(|id| weight(*id)).sum::<f64>();
        let mut sum = 0.0;
        let kept = order.iter().take_while(|id| {
            let takes = sum < target;
            sum += weight(**id);
            takes
        });
        let kept = kept.count();
        order.truncate(kept);
    }
    order.retain(|id| weight(*id) >= f64::from(params.min_p));
    order.sort_unstable();
    let target =
        unit_random(params.seed, output.len() as u32) * order.iter().map(|id| weight(*id)).sum::<f64>();
    let mut sum = 0.0;
    let drawn = order.iter().find(|id| {
        sum += weight(**id);
        target < sum
    });
    *drawn.unwrap() as u32
}

fn with<T>(params: &SamplingParams, change: impl FnOnce(&mut SamplingParams) -> T) -> SamplingParams {
    let mut params = params.clone();
    change(&mut params);
    params
}
