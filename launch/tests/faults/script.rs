//! The script language in which tests tell ranks what to do: actions separated by semicolons, see [`Action`].

use candle_core::{DType, Device, Tensor};
use comm::{Message, Operation, ReduceOp};

/// One action of a rank.
pub(crate) enum Action {
    /// `all_reduce f32 10 sum`, `reduce f32 10 sum ROOT`, `broadcast f32 10 ROOT`, `all_gather f32 10`,
    /// `reduce_scatter f32 10 sum`, `gather f32 10 ROOT`, `scatter f32 10 ROOT`, `all_to_all f32 10`, `barrier`;
    /// `coalesced f32 10 sum` and `broadcasts f32 10 ROOT`, of two tensors; `send f32 10 TO`, `recv f32 10 FROM`;
    /// `ring f32 10`, a batch to the next rank and from the previous one; `relay f32 10`, from each rank to the next.
    Call(Vec<String>),
    /// `group RANK RANK ...`: creates a group of these ranks, in which its members make the calls that follow.
    Group(Vec<usize>),
    /// `submit CALL`: starts the call and does not wait for it.
    Submit(Vec<String>),
    /// `detach`: another thread waits for the submitted calls.
    Detach,
    /// `wait_all`: waits for the submitted calls.
    WaitAll,
    /// `repeat CALL`: repeats the call indefinitely; reports that it is ready after three.
    Repeat(Vec<String>),
    /// `random SEED`: makes random calls, the same on all ranks with this seed, indefinitely; ready after three.
    Random(u64),
    /// `some SEED COUNT`: makes this number of random calls.
    Some(u64, usize),
    /// `polite SEED`: makes random calls until the test has sent a line to all ranks.
    Polite(u64),
    /// `pid`: reports the id of this process.
    Pid,
    /// `ready`: reports to the test.
    Ready,
    /// `await`: waits for a line from the test.
    Await,
    /// `sleep MILLISECONDS`
    Sleep(u64),
    /// `within RANK ...`: makes the calls that follow in an existing group of these ranks.
    Within(Vec<usize>),
    /// `meet RANK ...`: creates a group of these ranks, without the other ranks taking part.
    Meet(Vec<usize>),
    /// `around CALL`: reports that it is ready, then makes the call in one group after the other, indefinitely.
    Around(Vec<String>),
    /// `world`: makes the calls that follow in the group of all ranks.
    World,
    /// `survive CALL`: makes a call that must fail, and continues.
    Survive(Vec<String>),
    /// `announce WORDS`: says why this rank cannot go on.
    Announce(String),
    /// `close`: drops the group.
    Close,
    /// `abort`: aborts the group.
    Abort,
    /// `panic`
    Panic,
    /// `exit CODE`: exits at once, without dropping the group.
    Exit(i32),
    /// `die RANK`: that rank kills itself with SIGKILL; the others continue.
    Die(usize),
    /// `limit`: from now on this process cannot open any file.
    Limit,
    /// `cycles COUNT`: connects, makes calls and drops the group this many times.
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
        "some" => Action::Some(rest[0].parse().unwrap(), rest[1].parse().unwrap()),
        "polite" => Action::Polite(rest[0].parse().unwrap()),
        "group" => Action::Group(rest.iter().map(|rank| rank.parse().unwrap()).collect()),
        "within" => Action::Within(rest.iter().map(|rank| rank.parse().unwrap()).collect()),
        "meet" => Action::Meet(rest.iter().map(|rank| rank.parse().unwrap()).collect()),
        "world" => Action::World,
        "survive" => Action::Survive(rest.to_vec()),
        "around" => Action::Around(rest.to_vec()),
        "pid" => Action::Pid,
        "ready" => Action::Ready,
        "await" => Action::Await,
        "sleep" => Action::Sleep(rest[0].parse().unwrap()),
        "announce" => Action::Announce(rest.join(" ")),
        "close" => Action::Close,
        "abort" => Action::Abort,
        "panic" => Action::Panic,
        "exit" => Action::Exit(rest[0].parse().unwrap()),
        "die" => Action::Die(rest[0].parse().unwrap()),
        "limit" => Action::Limit,
        "cycles" => Action::Cycles(rest[0].parse().unwrap()),
        _ => Action::Call(words),
    }
}

/// Returns the operations of a rank for this call, on new tensors.
pub(crate) fn operations(words: &[String], rank: usize, world_size: usize) -> Vec<Operation> {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let (next, previous) = ((rank + 1) % world_size, (rank + world_size - 1) % world_size);
    match words[..] {
        ["ring", ..] if world_size == 1 => Vec::new(),
        ["ring", dtype, len] => {
            let (outgoing, incoming) = (tensor(dtype, number(len)), tensor(dtype, number(len)));
            let send = Message::Send { tensor: outgoing, to: next };
            vec![Operation::Batch {
                messages: vec![send, Message::Recv { tensor: incoming, from: previous }],
            }]
        }
        ["relay", dtype, len] => {
            let tensor = tensor(dtype, number(len));
            let from = (rank > 0).then(|| Operation::Recv { tensor: tensor.clone(), from: rank - 1 });
            let to =
                (rank + 1 < world_size).then(|| Operation::Send { tensor: tensor.clone(), to: rank + 1 });
            from.into_iter().chain(to).collect()
        }
        _ => vec![operation(&words, rank, world_size)],
    }
}

fn operation(words: &[&str], rank: usize, world_size: usize) -> Operation {
    match words[..] {
        ["barrier"] => Operation::Barrier,
        [name, dtype, len, ref rest @ ..] => {
            let (part, whole) = (tensor(dtype, number(len)), tensor(dtype, number(len) * world_size));
            collective(name, part, whole, rest, rank)
        }
        _ => panic!("no such call: {words:?}"),
    }
}

fn collective(name: &str, part: Tensor, whole: Tensor, rest: &[&str], rank: usize) -> Operation {
    let two = |tensor: &Tensor| vec![tensor.clone(), tensor.zeros_like().unwrap()];
    match (name, rest) {
        ("all_reduce", [op]) => Operation::AllReduce { tensor: part, op: reduce_op(op) },
        ("coalesced", [op]) => Operation::AllReduceCoalesced { tensors: two(&part), op: reduce_op(op) },
        ("reduce", [op, root]) => Operation::Reduce { tensor: part, op: reduce_op(op), root: number(root) },
        ("broadcast", [root]) => Operation::Broadcast { tensor: part, root: number(root) },
        ("broadcasts", [root]) => Operation::BroadcastCoalesced { tensors: two(&part), root: number(root) },
        ("all_gather", []) => Operation::AllGather { output: whole, input: part, counts: None },
        ("reduce_scatter", [op]) => {
            Operation::ReduceScatter { output: part, input: whole, op: reduce_op(op), counts: None }
        }
        ("gather", [root]) => {
            let output = (rank == number(root)).then_some(whole);
            Operation::Gather { output, input: part, root: number(root), counts: None }
        }
        ("scatter", [root]) => {
            let input = (rank == number(root)).then_some(whole);
            Operation::Scatter { output: part, input, root: number(root), counts: None }
        }
        ("all_to_all", []) => {
            let output = whole.zeros_like().unwrap();
            Operation::AllToAll { output, input: whole, output_counts: None, input_counts: None }
        }
        ("send", [to]) => Operation::Send { tensor: part, to: number(to) },
        ("recv", [from]) => Operation::Recv { tensor: part, from: number(from) },
        _ => panic!("no such call: {name} {rest:?}"),
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
