//! Small model files, made in memory.

/// A metadata value to write.
#[derive(Clone, Debug)]
pub enum Value {
    /// Type 4.
    U32(u32),
    /// Type 6.
    F32(f32),
    /// Type 8.
    Text(&'static str),
}

/// A file to write; change a field and the file changes with it.
#[derive(Clone, Debug)]
pub struct File {
    /// Keys and values.
    pub metadata: Vec<(String, Value)>,
    /// Names, dimensions (innermost first) and values of F32 tensors.
    pub tensors: Vec<(String, Vec<u64>, Vec<f32>)>,
}

/// Sizes of a random llama model. Nothing need be a multiple of anything, but for what `Config` demands.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Transformer blocks.
    pub layers: u32,
    /// Model width.
    pub d_model: u32,
    /// Feed-forward width.
    pub d_ff: u32,
    /// Query heads.
    pub heads: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Head width.
    pub head_dim: u32,
    /// Rotated values of a head.
    pub rope_dims: u32,
    /// Vocabulary.
    pub vocab: u32,
}

impl Sizes {
    /// Odd in every place: no width is a multiple of 16, heads are wider than the model, half of a head is rotated.
    pub const ODD: Self = Self {
        layers: 2,
        d_model: 18,
        d_ff: 37,
        heads: 6,
        kv_heads: 2,
        head_dim: 10,
        rope_dims: 6,
        vocab: 51,
    };
}

impl File {
    /// Makes a model whose weights are a fixed function of `seed`, with a tied output.
    #[must_use]
    pub fn llama(sizes: Sizes, seed: u64) -> Self {
        let Sizes { layers, d_model, d_ff, heads, kv_heads, head_dim, rope_dims, vocab } = sizes;
        let mut metadata = vec![
            ("general.architecture".to_owned(), Value::Text("llama")),
            ("llama.attention.layer_norm_rms_epsilon".to_owned(), Value::F32(1e-5)),
            ("llama.rope.freq_base".to_owned(), Value::F32(10_000.0)),
        ];
        for (key, value) in [
            ("block_count", layers),
            ("embedding_length", d_model),
            ("feed_forward_length", d_ff),
            ("attention.head_count", heads),
            ("attention.head_count_kv", kv_heads),
            ("attention.key_length", head_dim),
            ("attention.value_length", head_dim),
            ("rope.dimension_count", rope_dims),
            ("context_length", 256),
        ] {
            metadata.push((format!("llama.{key}"), Value::U32(value)));
        }
        let mut file = Self { metadata, tensors: Vec::new() };
        let mut random = Random(seed);
        file.push("token_embd.weight", &[d_model, vocab], &mut random);
        file.push("output_norm.weight", &[d_model], &mut random);
        for layer in 0..layers {
            for (part, dims) in [
                ("attn_norm", &[d_model][..]),
                ("attn_q", &[d_model, heads * head_dim]),
                ("attn_k", &[d_model, kv_heads * head_dim]),
                ("attn_v", &[d_model, kv_heads * head_dim]),
                ("attn_output", &[heads * head_dim, d_model]),
                ("ffn_norm", &[d_model]),
                ("ffn_gate", &[d_model, d_ff]),
                ("ffn_up", &[d_model, d_ff]),
                ("ffn_down", &[d_ff, d_model]),
            ] {
                file.push(&format!("blk.{layer}.{part}.weight"), dims, &mut random);
            }
        }
        file
    }

    /// Replaces a metadata value.
    ///
    /// # Panics
    /// If there is no such key.
    pub fn set(&mut self, key: &str, value: Value) {
        let entry = self.metadata.iter_mut().find(|(name, _)| name == key);
        entry.expect("the model has this key").1 = value;
    }

    /// Returns the bytes of the file, version 3, aligned to 32.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend((self.tensors.len() as u64).to_le_bytes());
        bytes.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            write_text(&mut bytes, key);
            match value {
                Value::U32(value) => bytes.extend([4, *value].map(u32::to_le_bytes).concat()),
                Value::F32(value) => bytes.extend([6, value.to_bits()].map(u32::to_le_bytes).concat()),
                Value::Text(value) => {
                    bytes.extend(8_u32.to_le_bytes());
                    write_text(&mut bytes, value);
                }
            }
        }
        let mut data = Vec::new();
        for (name, dims, values) in &self.tensors {
            write_text(&mut bytes, name);
            bytes.extend((dims.len() as u32).to_le_bytes());
            bytes.extend(dims.iter().flat_map(|dim| dim.to_le_bytes()));
            bytes.extend(0_u32.to_le_bytes());
            bytes.extend((data.len() as u64).to_le_bytes());
            data.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            data.resize(data.len().next_multiple_of(32), 0);
        }
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        bytes.extend(data);
        bytes
    }

    /// Appends a tensor of random values: gains around 1, weights that keep the size of what they map.
    fn push(&mut self, name: &str, dims: &[u32], random: &mut Random) {
        let count = dims.iter().product::<u32>();
        let values = match dims {
            [_] => (0..count).map(|_| 1.0 + 0.2 * random.next()).collect(),
            _ => (0..count).map(|_| random.next() * (3.0 / dims[0] as f32).sqrt()).collect(),
        };
        self.tensors.push((name.to_owned(), dims.iter().map(|&dim| dim.into()).collect(), values));
    }
}

fn write_text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}

/// SplitMix64 (Steele, Lea and Flood 2014).
struct Random(u64);

impl Random {
    /// Returns a number in `-1..1`.
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ z >> 31) >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}
