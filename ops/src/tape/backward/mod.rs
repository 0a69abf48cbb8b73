//! Backward through a graph of known operations.

use std::sync::LazyLock;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Tensor, TensorId, bail};
use rustc_hash::FxHashMap;

use crate::tape::add::sum;
use crate::tape::scalar_with_gradient;
use crate::tape::table::{LiveCall, is_known, known, known_graph};

/// Returns the gradients of all variables that `loss` depends on. They equal those of `loss.backward()` except for
/// the sign of a zero. For operations applied by [`apply_op1`](crate::tape::apply_op1) and its siblings it avoids candle's
/// zero tensors and the sums onto them.
///
/// Where the graph has another operation, candle runs backward through that and everything it depends on: for a loss
/// that is an `x.sqr()?` or a `reshape`, the whole graph; for a view of a weight, only that view. The gradient of a tensor that both
/// kinds of operations use is then summed in another order.
///
/// # Cost
/// The operations' own backward; one sum for each use of a tensor but the first, and a walk over the graph, or three where
/// some of its operations are candle's.
///
/// # Errors
/// Errors of the operations; a gradient whose shape or dtype differs from its tensor's.
///
/// See the [crate's documentation](crate) for an example.
pub fn backward(loss: &Tensor) -> Result<GradStore> {
    match Pass::new(loss) {
        Some(pass) if !*SECOND_ORDER => pass.run(loss),
        _ => loss.backward(),
    }
}

/// Whether [`backward`] knows every operation that `loss` depends on, and leaves nothing to candle.
///
/// ```
/// use candle_core::{Device, Var};
/// use ops::tape::{knows, scale};
///
/// let x = Var::new(2f32, &Device::Cpu)?;
/// assert!(knows(&scale(&x, 3.0)?) && !knows(&scale(&x.sqr()?, 3.0)?));
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn knows(loss: &Tensor) -> bool {
    Pass::new(loss).is_some_and(|pass| pass.parts.is_empty())
}

/// Returns a store without gradients; candle has no constructor for one.
///
/// # Errors
/// None are known.
pub fn empty() -> Result<GradStore> {
    Tensor::zeros((), DType::U8, &Device::Cpu).and_then(|nothing| {
        let mut store = nothing.backward()?;
        store.remove(&nothing);
        Ok(store)
    })
}

/// Whether candle keeps the history of gradients, which this backward does not support.
static SECOND_ORDER: LazyLock<bool> = LazyLock::new(|| {
    std::env::var("CANDLE_GRAD_DO_NOT_DETACH").is_ok_and(|value| !value.is_empty() && value != "0")
});

/// Plan of one backward pass.
#[derive(Default)]
struct Pass {
    /// In candle's order, since operations that depend on each other's order, such as gradient exchange between
    /// ranks, rely on it.
    steps: Vec<(Tensor, Step)>,
    /// The variables that the loss depends on; unused without parts.
    variables: Vec<TensorId>,
    /// Parts of the graph that candle runs backward through.
    parts: Vec<Part>,
    /// Index of the part that a tensor is in.
    part_of: FxHashMap<TensorId, usize>,
}

/// What backward does at a tensor.
enum Step {
    /// Runs the operation's own backward.
    Own(LiveCall),
    /// Runs candle's backward through the part with this index, once all its users are done.
    Part(usize),
}

/// Tensors connected by operations that only candle knows.
#[derive(Default)]
struct Part {
    /// Its tensors that known operations use, each once.
    entries: Vec<Tensor>,
    /// Number of uses by known operations whose backward has not run yet.
    users: usize,
    is_done: bool,
}

impl Pass {
    /// `None` if candle's own backward must run the whole graph.
    fn new(loss: &Tensor) -> Option<Self> {
        if !is_known(loss.id()) {
            return None;
        }
        match known_graph(loss) {
            Some(calls) => {
                let steps = calls.into_iter().map(|(result, call)| (result, Step::Own(call))).collect();
                Some(Self { steps, ..Self::default() })
            }
            None => Self::with_parts(loss),
        }
    }

    /// The pass of a graph with operations that are not known.
    fn with_parts(loss: &Tensor) -> Option<Self> {
        let nodes = loss.sorted_nodes();
        let mut known = known(&nodes);
        find_views(&nodes, &mut known);
        let mut groups = Groups::default();
        for (node, _) in
            nodes.iter().zip(&known).filter(|(node, known)| known.is_none() && !node.is_variable())
        {
            groups.join_dependencies(node);
        }
        let part_of = groups.numbered();
        let mut parts: Vec<Part> = Vec::new();
        parts.resize_with(part_of.values().max().map_or(0, |last| last + 1), Part::default);
        let variables = nodes.iter().filter(|node| node.is_variable()).map(|node| node.id()).collect();
        let step = |(node, known): (&Tensor, Option<LiveCall>)| match part_of.get(&node.id()) {
            Some(&part) => Some((node.clone(), Step::Part(part))),
            None if node.is_variable() => None,
            None => Some((node.clone(), Step::Own(known?))),
        };
        let steps: Vec<_> = nodes.into_iter().zip(known).filter_map(step).collect();
        for (_, step) in &steps {
            let Step::Own(call) = step else { continue };
            for argument in call.arguments() {
                let Some(part) = part_of.get(&argument.id()).map(|&part| &mut parts[part]) else { continue };
                part.users += 1;
                if part.entries.iter().all(|entry| entry.id() != argument.id()) {
                    part.entries.push(argument.clone());
                }
            }
        }
        let on_one_device =
            |part: &Part| part.entries.windows(2).all(|pair| pair[0].device().same_device(pair[1].device()));
        parts.iter().all(on_one_device).then_some(Self { steps, variables, parts, part_of })
    }

    fn run(mut self, loss: &Tensor) -> Result<GradStore> {
        let mut grads = Gradients::default();
        grads.0.insert(loss.id(), loss.ones_like()?.contiguous()?);
        for (node, step) in self.steps {
            let call = match step {
                Step::Own(call) => call,
                Step::Part(part) => {
                    grads.of_part(&mut self.parts[part], &self.variables)?;
                    continue;
                }
            };
            // Missing if every operation that uses the tensor returned none.
            if let Some(gradient) = grads.0.remove(&node.id()) {
                let given = call.backward(&node, &gradient)?;
                grads.take(call.arguments(), given, &gradient)?;
            }
            for argument in call.arguments() {
                if let Some(&part) = self.part_of.get(&argument.id()) {
                    self.parts[part].users -= 1;
                }
            }
        }
        let mut store = empty()?;
        grads.0.into_iter().for_each(|(id, gradient)| drop(store.insert_id(id, gradient)));
        Ok(store)
    }
}

/// Finds candle's tensors that only reshape another one (`reshape`, `flatten`, `squeeze`): they have the same storage
/// and the same contiguous range. No other operation in a graph has that.
fn find_views(nodes: &[&Tensor], known: &mut [Option<LiveCall>]) {
    let mut lying: FxHashMap<(usize, usize, usize), &Tensor> = FxHashMap::default();
    // From the variables on, so that a view comes after its original.
    for (node, known) in nodes.iter().zip(known).rev() {
        let (start, end) = match node.layout().contiguous_offsets() {
            Some(span) if node.elem_count() > 0 => span,
            _ => continue,
        };
        let of = lying.insert((storage_address(node), start, end), node);
        if known.is_none() && !node.is_variable() {
            *known = of.map(|of| LiveCall::View([of.clone()]));
        }
    }
}

/// Connected groups of tensors (union-find).
#[derive(Default)]
struct Groups {
    /// Parent of each tensor in its group; the representative is its own parent.
    above: FxHashMap<TensorId, TensorId>,
}

impl Groups {
    /// Joins a tensor with everything it depends on except variables.
    fn join_dependencies(&mut self, node: &Tensor) {
        if self.above.contains_key(&node.id()) {
            // Then everything below it is, too.
            return;
        }
        self.above.insert(node.id(), node.id());
        for below in node.sorted_nodes().into_iter().filter(|below| !below.is_variable()) {
            let group = self.root(below.id()).unwrap_or(below.id());
            self.above.insert(below.id(), group);
            self.above.insert(group, node.id());
        }
    }

    /// The representative of a tensor's group.
    fn root(&self, id: TensorId) -> Option<TensorId> {
        let mut at = id;
        loop {
            match *self.above.get(&at)? {
                above if above == at => return Some(at),
                above => at = above,
            }
        }
    }

    /// Numbers the groups, and returns each tensor's group number.
    fn numbered(&self) -> FxHashMap<TensorId, usize> {
        let mut numbers = FxHashMap::default();
        let of = |(&id, _): (&TensorId, &TensorId)| {
            let group = self.root(id)?;
            let next = numbers.len();
            Some((id, *numbers.entry(group).or_insert(next)))
        };
        self.above.iter().filter_map(of).collect()
    }
}

/// Gradients computed so far, by tensor id.
#[derive(Default)]
struct Gradients(FxHashMap<TensorId, Tensor>);

impl Gradients {
    /// Adds the gradients `given` for an operation's arguments, computed from that of its result.
    fn take(&mut self, arguments: &[Tensor], given: [Option<Tensor>; 3], of_result: &Tensor) -> Result<()> {
        let mut taken = vec![of_result.clone()];
        for (argument, gradient) in arguments.iter().zip(given) {
            let Some(gradient) = gradient else { continue };
            if (gradient.shape(), gradient.dtype()) != (argument.shape(), argument.dtype()) {
                let of = |tensor: &Tensor| format!("{:?} of {:?}", tensor.dtype(), tensor.dims());
                bail!("a gradient is {}, its tensor {}", of(&gradient), of(argument))
            }
            let gradient = gradient.detach();
            let is_wanted = argument.is_variable() || !argument.track_op();
            // Callers may modify variables' gradients in place, so each has its own storage.
            let is_shared = is_wanted && taken.iter().any(|other| share_storage(other, &gradient));
            let gradient = match is_shared {
                true => gradient.force_contiguous()?,
                false => gradient.contiguous()?,
            };
            taken.push(gradient.clone());
            self.add(argument.id(), gradient)?;
        }
        Ok(())
    }

    /// Runs candle's backward through a part, down to the variables, once all its users are done. This is certain at
    /// the latest at the part's last tensor in the order of steps.
    fn of_part(&mut self, part: &mut Part, variables: &[TensorId]) -> Result<()> {
        if part.users > 0 || std::mem::replace(&mut part.is_done, true) {
            return Ok(());
        }
        let mut roots = Vec::new();
        for entry in &part.entries {
            if let Some(gradient) = self.0.remove(&entry.id()) {
                roots.push(scalar_with_gradient(entry, gradient)?.to_dtype(DType::F32)?);
            }
        }
        let Some(root) = roots.into_iter().map(Ok).reduce(|sum, root| sum? + root?).transpose()? else {
            return Ok(());
        };
        let grads = root.backward()?;
        variables.iter().try_for_each(|&variable| match grads.get_id(variable) {
            Some(gradient) => self.add(variable, gradient.detach()),
            None => Ok(()),
        })
    }

    fn add(&mut self, id: TensorId, gradient: Tensor) -> Result<()> {
        let sum = match self.0.get(&id) {
            Some(before) => sum(before, &gradient)?,
            None => gradient,
        };
        self.0.insert(id, sum);
        Ok(())
    }
}

/// Whether two tensors share a storage.
fn share_storage(a: &Tensor, b: &Tensor) -> bool {
    storage_address(a) == storage_address(b)
}

/// Returns the address of a tensor's storage, which identifies it as long as a tensor holds it.
pub fn storage_address(tensor: &Tensor) -> usize {
    std::ptr::from_ref(&*tensor.storage_and_layout().0).addr()
}

#[cfg(test)]
mod tests;
