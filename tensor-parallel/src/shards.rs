//! `Shards`: divided layers for a model that something else builds part by part and trains, such as the stages of a pipeline.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Shape, Tensor, Var};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder, VarMap};
use comm::{Mesh, Operation, ReduceOp};
use training::build::RangeReader;
use training::internal::{Runs, lock};

use crate::division::Division;
use crate::source::RequestedDivision;
use crate::{Context, RandomStreams, Result, ShardBuilder, Split, TensorParallelConfig, Weights, same_model};

/// Supplies each rank of a tensor-parallel group with its part of the weights, through a candle [`VarBuilder`]: for code that
/// builds modules with a [`VarBuilder`] and a separate [`VarMap`] for each part of the model, such as a pipeline.
///
/// The variables in the maps are the parts. Layers of this crate request theirs with [`of`](Self::of); all other variables
/// are whole on every rank.
///
/// ```
/// use candle_nn::VarMap;
/// use comm::{Local, Mesh};
/// use tensor_parallel::{ColumnConfig, ColumnParallelLinear, Shards, TensorParallelConfig, Weights};
///
/// let dims = Local::run_shared(4, |comm| {
///     let mesh = Mesh::new(comm, &[("pp", 2), ("tp", 2)])?;
///     let shards = Shards::new(&mesh, &TensorParallelConfig::default(), &Weights::seed(42))?;
///     let map = VarMap::new(); // a stage's, given to each module's constructor
///     let builder = shards.var_builder(&map).pp("fc");
///     ColumnParallelLinear::new(8, 12, &ColumnConfig::default(), &shards.of(builder))?;
///     let dims = map.data().lock().unwrap()["fc.weight"].dims().to_vec();
///     Ok(dims)
/// })?;
/// assert_eq!(dims, vec![vec![6, 8]; 4]);
/// # Ok::<(), comm::Error>(())
/// ```
#[derive(Clone)]
pub struct Shards {
    source: ShardBuilder,
    asked: RequestedDivision,
    /// Names of variables whose gradient must be summed over the ranks.
    summed: Arc<Mutex<BTreeSet<String>>>,
    /// Variables that were requested, and what this rank has of each.
    held: Arc<Mutex<BTreeMap<String, HeldPart>>>,
    /// Variables that only other ranks have, and their numbers of elements.
    skipped: Arc<Mutex<BTreeMap<String, usize>>>,
    /// For each copy of another variable, the name of that one.
    copies: Arc<BTreeMap<String, String>>,
    /// Drawn values for copies that have not been requested yet, by the copy's name.
    awaited: Arc<Mutex<BTreeMap<String, Tensor>>>,
}

/// What a rank has of a parameter.
#[derive(Debug, Clone)]
struct HeldPart {
    dims: Vec<usize>,
    runs: Runs,
    is_divided: bool,
}

impl Shards {
    /// Creates the source of weights. The mesh must have an axis `tp`; every rank of the mesh must call this.
    ///
    /// # Errors
    /// A mesh without that axis; a configuration that differs between ranks; a file that cannot be read.
    pub fn new(mesh: &Mesh, config: &TensorParallelConfig, weights: &Weights) -> Result<Self> {
        let tp = mesh.axis("tp")?.clone();
        let copy = mesh.axis("dp").map_or(0, |dp| dp.rank());
        let place = tp.rank();
        let random = RandomStreams::new(config.seed, copy, place);
        let context = Context::new(tp, config.sequence_parallel, random);
        let source = ShardBuilder::new(weights, config, context, false);
        let (source, opened) = match source {
            Ok(source) => (Some(source), Ok(Vec::new())),
            Err(error) => (None, Err(error)),
        };
        same_model::check(&**mesh.world(), place, config.describe(), opened)?;
        let Some(source) = source else {
            return Err(crate::Error::invalid("the weights", "none", "this is a mistake in tensor-parallel"));
        };
        Ok(Self {
            source,
            asked: RequestedDivision::default(),
            summed: Arc::default(),
            held: Arc::default(),
            skipped: Arc::default(),
            copies: Arc::default(),
            awaited: Arc::default(),
        })
    }

    /// Returns the same source, in which some variables have the values of others: `copies` gives for the name of each
    /// copy that of the other, which is requested first. Nothing is drawn for a copy, and from a file it is read by the
    /// other's name.
    #[must_use]
    pub fn with_copies(self, copies: impl IntoIterator<Item = (String, String)>) -> Self {
        Self { copies: Arc::new(copies.into_iter().collect()), ..self }
    }

    /// Returns a builder that stores this rank's part of each variable in `map`. Random weights are drawn whole, in the order
    /// in which they are requested, including those of modules that are then dropped.
    pub fn var_builder(&self, map: &VarMap) -> VarBuilder<'static> {
        self.builder(Some(map.clone()))
    }

    /// Returns a builder that stores nothing, for code that creates its own variables, as `Ddp` and `Fsdp` do.
    pub fn tensor_builder(&self) -> VarBuilder<'static> {
        self.builder(None)
    }

    fn builder(&self, map: Option<VarMap>) -> VarBuilder<'static> {
        let (dtype, device) = (self.source.dtype(), self.source.device().clone());
        VarBuilder::from_backend(Box::new(Backend { shards: self.clone(), map }), dtype, device)
    }

    /// Returns the same weights as a source that reads ranges of this rank's parts, for code that shards them further, as
    /// FSDP units do. `None` if weights are drawn in sequence.
    pub fn parts(&self) -> Option<Arc<dyn RangeReader>> {
        self.source.has_parts().then(|| Arc::new(Parts(self.clone())) as Arc<dyn RangeReader>)
    }

    /// Returns a builder for layers of this crate, given one from [`var_builder`](Self::var_builder). With any other builder,
    /// whose variables are whole, layers take their part of them.
    pub fn of(&self, builder: VarBuilder<'static>) -> ShardBuilder {
        ShardBuilder::external(builder, self.asked.clone(), self.context().clone())
    }

    /// Returns the tensor-parallel context of the layers.
    pub fn context(&self) -> &Context {
        self.source.context()
    }

    /// Returns the shape of the whole variable, and which of its elements this rank has, if each rank has only a part of it: for
    /// code that counts, compares or saves each parameter once, as `Pipeline::set_divided`. Known once the variable has been
    /// requested.
    pub fn divided(&self, name: &str) -> Option<(Vec<usize>, Runs)> {
        lock(&self.held).get(name).filter(|held| held.is_divided).map(|held| (held.dims.clone(), held.runs))
    }

    /// Returns the shape of the whole variable, and which of its elements this rank has. Known once the variable has been
    /// requested.
    pub fn held(&self, name: &str) -> Option<(Vec<usize>, Runs)> {
        lock(&self.held).get(name).map(|held| (held.dims.clone(), held.runs))
    }

    /// Returns the number of elements of all whole variables that have been requested so far, also of those that are divided, or
    /// that only other ranks have ([`Layers::skip_weight`](training::build::Layers::skip_weight)).
    pub fn elements(&self) -> usize {
        let held: usize = lock(&self.held).values().map(|held| held.dims.iter().product::<usize>()).sum();
        held + lock(&self.skipped).values().sum::<usize>()
    }

    /// Passes over a variable that is of the model and not of this rank. If weights are drawn in sequence, it is drawn and dropped.
    pub(crate) fn skip(&self, name: &str, shape: Shape, init: Init, dtype: DType) -> Result<()> {
        lock(&self.skipped).insert(name.to_string(), shape.elem_count());
        if !self.source.has_parts() {
            self.parameter((&shape, dtype), name, init, Split::Whole.into())?;
        }
        Ok(())
    }

    /// Sums over the ranks the gradients of those variables of which each rank computes only a part: with sequence
    /// parallelism those of norms and biases, and always those of norms per attention head (Qwen3's). Must be called on every
    /// rank of the group, after each step's backward.
    ///
    /// # Cost
    /// One all-reduce of these variables, if there are any.
    ///
    /// # Errors
    /// Failures of communication.
    pub fn sum_gradients(&self, vars: &[(String, Var)], gradients: &mut GradStore) -> Result<()> {
        let mut tensors = Vec::new();
        for (_, var) in vars.iter().filter(|(name, _)| lock(&self.summed).contains(name)) {
            let Some(gradient) = gradients.get(var) else { continue };
            let gradient = gradient.contiguous()?;
            gradients.insert(var, gradient.clone());
            tensors.push(gradient);
        }
        if !tensors.is_empty() {
            self.context().comm().run(Operation::AllReduceCoalesced { tensors, op: ReduceOp::Sum })?;
        }
        Ok(())
    }
}

impl Shards {
    /// Takes the division of the variable that is being requested.
    fn take_asked(&self) -> Division {
        lock(&self.asked).take().unwrap_or(Split::Whole.into())
    }

    /// Returns this rank's part of a variable: that of the variable of which it is a copy, if it is one.
    fn parameter(
        &self,
        (shape, dtype): (&Shape, DType),
        name: &str,
        init: Init,
        division: Division,
    ) -> Result<Var> {
        let source = self.source.clone().of_dtype(name, dtype)?;
        let original = self.copies.get(name);
        let drawn = original.filter(|_| !source.has_parts());
        if let Some(original) = drawn {
            let Some(value) = lock(&self.awaited).remove(name) else {
                let help = format!("it is a copy of {original}, which must be asked for before");
                return Err(crate::Error::invalid("parameter", name, help));
            };
            let context = self.context();
            let dims = division.dims(name, shape.dims(), (context.rank(), context.ranks()))?;
            if value.dims() != dims {
                let help =
                    format!("it is a copy of {original}: this rank's part has shape {:?}", value.dims());
                return Err(crate::Error::invalid(&format!("parameter {name}"), format!("{dims:?}"), help));
            }
            return Ok(Var::from_tensor(&value)?);
        }
        source.parameter(shape.clone(), original.map_or(name, String::as_str), init, division)?;
        let Some(parameter) = source.take_last() else {
            return Err(crate::Error::invalid("the weights", "none", "this is a mistake in tensor-parallel"));
        };
        let var = parameter.var().clone();
        if !source.has_parts() {
            let copies = self.copies.iter().filter(|(_, original)| *original == name);
            let values = copies.map(|(copy, _)| (copy.clone(), var.as_detached_tensor()));
            lock(&self.awaited).extend(values);
        }
        Ok(var)
    }

    /// Checks that a variable that is requested again has the same shape.
    fn check_known(&self, name: &str, shape: &Shape) -> candle_core::Result<()> {
        match self.held(name) {
            Some((dims, _)) if dims != shape.dims() => candle_core::bail!(
                "parameter {name}: it is asked for with shape {:?}, before with {dims:?}; one name is one parameter",
                shape.dims()
            ),
            _ => Ok(()),
        }
    }

    /// Records what this rank has of a variable.
    fn note(&self, name: &str, dims: Vec<usize>, division: Division) {
        if division.summed {
            lock(&self.summed).insert(name.to_string());
        }
        let context = self.context();
        let runs = division.split.runs(&dims, context.rank(), context.ranks());
        let held = HeldPart { dims, runs, is_divided: division.split != Split::Whole };
        lock(&self.held).insert(name.to_string(), held);
    }
}

impl fmt::Debug for Shards {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Shards({:?})", self.context().comm())
    }
}

/// `VarBuilder` backend that returns this rank's parts, and may store them in a map.
struct Backend {
    shards: Shards,
    map: Option<VarMap>,
}

impl SimpleBackend for Backend {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        dtype: DType,
        _: &Device,
    ) -> candle_core::Result<Tensor> {
        let division = self.shards.take_asked();
        if let Some(known) = self.map.as_ref().and_then(|map| lock(map.data()).get(name).cloned()) {
            self.shards.check_known(name, &shape)?;
            return Ok(known.as_tensor().clone());
        }
        let var = self.shards.parameter((&shape, dtype), name, init, division)?;
        let tensor = var.as_tensor().clone();
        if let Some(map) = &self.map {
            lock(map.data()).insert(name.to_string(), var);
        }
        self.shards.note(name, shape.dims().to_vec(), division);
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> candle_core::Result<Tensor> {
        candle_core::bail!("{name}: its shape must be asked for, as in VarBuilder::get")
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.map.as_ref().is_some_and(|map| lock(map.data()).contains_key(name))
    }
}

/// Source that reads ranges of this rank's parts.
struct Parts(Shards);

impl RangeReader for Parts {
    fn read(
        &self,
        name: &str,
        shape: &Shape,
        init: Init,
        dtype: DType,
        ranges: &[Range<usize>],
    ) -> candle_core::Result<Tensor> {
        let Some((_, runs)) = self.0.held(name) else {
            candle_core::bail!("parameter {name} is read before its shape has been asked for")
        };
        let ranges: Vec<_> = ranges.iter().flat_map(|range| runs.within(range.clone())).collect();
        let name = self.0.copies.get(name).map_or(name, String::as_str);
        Ok(self.0.source.read(name, shape, init, dtype, &ranges)?)
    }

    fn shape(&self, name: &str, whole: &Shape) -> candle_core::Result<Shape> {
        let division = self.0.take_asked();
        let context = self.0.context();
        let dims = division.dims(name, whole.dims(), (context.rank(), context.ranks()))?;
        self.0.note(name, whole.dims().to_vec(), division);
        Ok(dims.into())
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Tensor};
    use candle_nn::{Init, VarMap};
    use comm::{Local, Mesh};

    use super::Shards;
    use crate::{TensorParallelConfig, Weights};

    const INIT: Init = Init::Randn { mean: 0.0, stdev: 1.0 };

    fn alone<T: Send>(test: impl Fn(Shards) -> candle_core::Result<T> + Sync) -> T {
        let on_rank = |comm| {
            let mesh = Mesh::new(comm, &[("tp", 1)])?;
            Ok(test(Shards::new(&mesh, &TensorParallelConfig::default(), &Weights::seed(5))?)?)
        };
        Local::run_shared(1, on_rank).unwrap().remove(0)
    }

    #[test]
    fn a_copy_has_the_value_of_the_other_and_nothing_is_drawn_for_it() {
        let copies = [("head".to_string(), "table".to_string())];
        let [table, head, last] = alone(|shards| {
            let (map, shards) = (VarMap::new(), shards.with_copies(copies.clone()));
            let (first, other) = (shards.var_builder(&map), shards.var_builder(&VarMap::new()));
            let table = first.get_with_hints((3, 4), "table", INIT)?;
            // Of variables of its own.
            let head = other.get_with_hints((3, 4), "head", INIT)?;
            assert_ne!(table.id(), head.id());
            [table, head, other.get_with_hints((3, 4), "last", INIT)?]
                .iter()
                .map(Tensor::to_vec2::<f32>)
                .collect::<Result<Vec<_>, _>>()
        })
        .try_into()
        .unwrap();
        assert_eq!(head, table);
        let drawn = alone(|shards| {
            let builder = shards.tensor_builder();
            builder.get_with_hints((3, 4), "table", INIT)?;
            builder.get_with_hints((3, 4), "last", INIT)?.to_vec2::<f32>()
        });
        assert_eq!(last, drawn);
        let early = alone(|shards| {
            let shards = shards.with_copies(copies.clone());
            Ok(shards.tensor_builder().get((3, 4), "head").unwrap_err().to_string())
        });
        assert!(early.contains("it is a copy of table, which must be asked for before"), "{early}");
    }

    #[test]
    fn integers_stay_integers_and_another_floating_point_dtype_is_refused() {
        let (ids, refused) = alone(|shards| {
            let builder = shards.tensor_builder();
            let ids = builder.get_with_hints_dtype(3, "ids", Init::Const(2.0), DType::I64)?;
            let refused = builder.get_with_hints_dtype(3, "scale", INIT, DType::F64);
            Ok((ids.to_vec1::<i64>()?, refused.unwrap_err().to_string()))
        });
        assert_eq!(ids, [2; 3]);
        assert!(refused.contains("the dtype of scale: got F64; ask for F32"), "{refused}");
    }

    #[test]
    fn a_name_has_one_shape() {
        let refused = alone(|shards| {
            let builder = shards.var_builder(&VarMap::new());
            builder.get((4, 4), "weight")?;
            builder.get((4, 4), "weight")?;
            Ok(builder.get((2, 4), "weight").unwrap_err().to_string())
        });
        assert!(
            refused.contains("parameter weight: it is asked for with shape [2, 4], before with [4, 4]"),
            "{refused}"
        );
    }
}
