//! The language in which tests tell ranks what to do: actions separated by semicolons, see [`Action`].

use candle_core::{DType, Device, Tensor};
use comm::{Operation, ReduceOp};

/// One action of a rank.
pub(crate) enum Action {
    /// `all_reduce f32 10 sum`, `reduce f32 10 sum ROOT`, `broadcast f32 10 ROOT`, `all_gather f32 10`,
    /// `reduce_scatter f32 10 sum`, `barrier`, `send f32 10 TO`, `recv f32 10 FROM`.
    Call(Vec<String>),
    /// `submit CALL`: does not wait for it.
    Submit(Vec<String>),
    /// `detach`: another thread waits for what was submitted.
    Detach,
    /// `wait_all`: for what was submitted.
    WaitAll,
    /// `repeat CALL`: for ever; says that it is ready when it has done so three times.
    Repeat(Vec<String>),
    /// `random SEED`: calls that all ranks with this seed choose alike, for ever; ready after three.
    Random(u64),
    /// `ready`: tells the test.
    Ready,
    /// `await`: the test's word.
    Await,
    /// `sleep MILLISECONDS`
    Sleep(u64),
    /// `close`: drops the group.
    Close,
    /// `panic`
    Panic,
    /// `exit CODE`: at once, without dropping the group.
    Exit(i32),
    /// `die RANK`: that rank kills itself with SIGKILL; the others go on.
    Die(usize),
    /// `limit`: from now on this process cannot open any file.
    Limit,
    /// `cycles COUNT`: connects, calls and drops so many times.
    Cycles(usize),
}

pub(crate) fn parse(script: &str) -> Vec<Action> {
    script.split(';').map(str::trim).filter(|text| !text.is_empty()).map(parse_action).collect()
}

fn parse_action(text: &str) -> Action {
    let words: Vec<String> = text.split_whitespace().map(String::from).collect();
    let (first, rest) = words.split_first().unwrap();
    match first.as_str() {
        "submit" => Action::Submit(rest.to_vec()),
        "detach" => Action::Detach,
        "wait_all" => Action::WaitAll,
        "repeat" => Action::Repeat(rest.to_vec()),
        "random" => Action::Random(rest[0].parse().unwrap()),
        "ready" => Action::Ready,
        "await" => Action::Await,
        "sleep" => Action::Sleep(rest[0].parse().unwrap()),
        "close" => Action::Close,
        "panic" => Action::Panic,
        "exit" => Action::Exit(rest[0].parse().unwrap()),
        "die" => Action::Die(rest[0].parse().unwrap()),
        "limit" => Action::Limit,
        "cycles" => Action::Cycles(rest[0].parse().unwrap()),
        _ => Action::Call(words),
    }
}

/// The operation that these words stand for, on new tensors.
pub(crate) fn operation(words: &[String], world_size: usize) -> Operation {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["all_reduce", dtype, len, op] => {
            Operation::AllReduce { tensor: tensor(dtype, number(len)), op: reduce_op(op) }
        }
        ["reduce", dtype, len, op, root] => {
            Operation::Reduce { tensor: tensor(dtype, number(len)), op: reduce_op(op), root: number(root) }
        }
        ["broadcast", dtype, len, root] => {
            Operation::Broadcast { tensor: tensor(dtype, number(len)), root: number(root) }
        }
        ["all_gather", dtype, len] => Operation::AllGather {
            output: tensor(dtype, number(len) * world_size),
            input: tensor(dtype, number(len)),
            counts: None,
        },
        ["reduce_scatter", dtype, len, op] => Operation::ReduceScatter {
            output: tensor(dtype, number(len)),
            input: tensor(dtype, number(len) * world_size),
            op: reduce_op(op),
            counts: None,
        },
        ["barrier"] => Operation::Barrier,
        ["send", dtype, len, to] => Operation::Send { tensor: tensor(dtype, number(len)), to: number(to) },
        ["recv", dtype, len, from] => {
            Operation::Recv { tensor: tensor(dtype, number(len)), from: number(from) }
        }
        _ => panic!("no such call: {words:?}"),
    }
}

fn number(word: &str) -> usize {
    word.parse().unwrap()
}

fn tensor(dtype: &str, len: usize) -> Tensor {
    let dtype = match dtype {
        "f64" => DType::F64,
        "f32" => DType::F32,
        "f16" => DType::F16,
        "bf16" => DType::BF16,
        "u8" => DType::U8,
        "u32" => DType::U32,
        "i64" => DType::I64,
        other => panic!("no dtype {other}"),
    };
    Tensor::ones(len, dtype, &Device::Cpu).unwrap()
}

fn reduce_op(word: &str) -> ReduceOp {
    match word {
        "sum" => ReduceOp::Sum,
        "avg" => ReduceOp::Avg,
        "product" => ReduceOp::Product,
        "min" => ReduceOp::Min,
        "max" => ReduceOp::Max,
        other => panic!("no reduce op {other}"),
    }
}

/// Numbers that look random (SplitMix64).
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }

    /// A collective.
    pub(crate) fn collective(&mut self, world_size: usize) -> Vec<String> {
        let root = self.below(world_size as u64);
        let len = [1, 5, 1000, 300_000][self.below(4) as usize];
        let text = match self.below(6) {
            0 => format!("all_reduce f32 {len} sum"),
            1 => format!("reduce f32 {len} sum {root}"),
            2 => format!("broadcast f32 {len} {root}"),
            3 => format!("all_gather f32 {len}"),
            4 => format!("reduce_scatter f32 {len} sum"),
            _ => "barrier".into(),
        };
        text.split(' ').map(String::from).collect()
    }
}
