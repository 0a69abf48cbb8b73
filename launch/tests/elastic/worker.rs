//! A rank: makes steps together with the others, in whatever group there is, until all are told to end.

use std::io::{BufRead, stdin};
use std::process::exit;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use candle_core::{Device, Tensor};
use comm::{Communicator, Operation, ReduceOp, Result, Tcp, TcpConfig, all_gather_object, broadcast_object};
use launch::EXIT_PEER_FAILED;

use crate::rank::ends_with_its_parent;

/// Maximum number of ranks.
pub(crate) const ROOM: usize = 6;

/// Not a test by itself: the entry point of ranks.
#[test]
fn process() {
    if !ends_with_its_parent() {
        return;
    }
    match run() {
        Ok(()) => exit(0),
        Err(error) => {
            println!("@failed {error}");
            exit(if error.is_peer_failure() { EXIT_PEER_FAILED } else { 1 })
        }
    }
}

/// Stands for a model: each step changes it, depending on which ranks take part.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
struct State {
    steps: u64,
    sum: u64,
}

fn run() -> Result<()> {
    let config = TcpConfig::from_env()?;
    let mut comm: Arc<dyn Communicator> = Arc::new(Tcp::connect(&config)?);
    let told = Arc::new(AtomicBool::new(false));
    let listener = told.clone();
    std::thread::spawn(move || {
        stdin().lock().read_line(&mut String::new()).unwrap();
        listener.store(true, Ordering::SeqCst);
    });
    let mut state = State { steps: 0, sum: 0 };
    // A rank that joins late gets the state of the others.
    let mut hand_over = true;
    let mut lost: Option<Instant> = None;
    loop {
        let outcome = match hand_over {
            true => catch_up(&*comm, &mut state).map(|()| false),
            false => step(&mut comm, &mut state, &told),
        };
        match outcome {
            Ok(true) => {
                println!("@done {} {} {:?}", state.steps, state.sum, comm.world_ranks());
                return Ok(());
            }
            Ok(false) => {
                if std::mem::take(&mut hand_over) {
                    let ms = lost.take().map_or(0, |at| at.elapsed().as_millis());
                    println!("@group {:?} {} {} {ms}", comm.world_ranks(), state.steps, state.sum);
                }
            }
            Err(error) if error.is_loss() => {
                lost.get_or_insert(Instant::now());
                println!("@lost {error}");
                comm = comm.elastic()?.shrink()?;
                hand_over = true;
            }
            Err(error) => return Err(error),
        }
    }
}

/// All ranks take over the state of the rank that has done most steps.
fn catch_up(comm: &dyn Communicator, state: &mut State) -> Result<()> {
    let steps: Vec<u64> = all_gather_object(comm, &state.steps)?;
    let ahead = (0..steps.len()).rev().max_by_key(|rank| steps[*rank]).unwrap();
    *state = broadcast_object(comm, state, ahead)?;
    Ok(())
}

/// Makes one step. Returns true when all ranks were told to end.
fn step(comm: &mut Arc<dyn Communicator>, state: &mut State, told: &AtomicBool) -> Result<bool> {
    let number = comm.world_ranks()[comm.rank()] as i64;
    let told = i64::from(!told.load(Ordering::SeqCst));
    let tensor = Tensor::new(&[number + 1, told, comm.elastic()?.waiting() as i64], &Device::Cpu)?;
    comm.run(Operation::AllReduce { tensor: tensor.clone(), op: ReduceOp::Sum })?;
    let sums = tensor.to_vec1::<i64>()?;
    state.steps += 1;
    state.sum = state.sum.wrapping_mul(31).wrapping_add(sums[0] as u64);
    if sums[1] == 0 {
        return Ok(true);
    }
    if sums[2] > 0 {
        *comm = comm.elastic()?.grow(ROOM)?;
        catch_up(&**comm, state)?;
        println!("@group {:?} {} {} 0", comm.world_ranks(), state.steps, state.sum);
    }
    std::thread::sleep(Duration::from_micros(200));
    Ok(false)
}
