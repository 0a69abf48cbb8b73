//! Ranks in a grid of named axes.

use std::sync::Arc;

use crate::{Communicator, Error, Result};

/// The ranks of a group as a grid, one axis for each kind of parallelism. Along each axis, the ranks that differ in that
/// coordinate only are a group.
///
/// The last axis is the one whose neighbours are neighbours in rank: give it to what talks most.
///
/// ```
/// use std::sync::Arc;
/// use comm::{Communicator, Local, LocalConfig, Mesh};
///
/// let ranks = Local::group(4, &LocalConfig::default())?;
/// let threads = ranks.into_iter().map(|comm| {
///     std::thread::spawn(move || {
///         let mesh = Mesh::new(Arc::new(comm), &[("dp", 2), ("tp", 2)])?;
///         Ok(mesh.axis("tp")?.world_ranks().to_vec())
///     })
/// });
/// let threads: Vec<_> = threads.collect();
/// let groups: comm::Result<Vec<_>> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
/// assert_eq!(groups?, [[0, 1], [0, 1], [2, 3], [2, 3]]);
/// # Ok::<(), comm::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Mesh {
    world: Arc<dyn Communicator>,
    axes: Vec<Axis>,
}

#[derive(Debug, Clone)]
struct Axis {
    name: String,
    comm: Arc<dyn Communicator>,
}

impl Mesh {
    /// Divides the ranks of `comm` along `axes`, each a name and a size. Every rank of the group must call this.
    ///
    /// # Cost
    /// A [`Communicator::split`] for each axis.
    ///
    /// # Errors
    /// Sizes whose product is not the world size, a size of 0, a name that is given twice; those of
    /// [`Communicator::split`].
    pub fn new(comm: Arc<dyn Communicator>, axes: &[(&str, usize)]) -> Result<Self> {
        let refuse = |got: String, help: &str| Err(Error::invalid("the axes of a mesh", got, help));
        for (index, (name, _)) in axes.iter().enumerate() {
            if axes[..index].iter().any(|(other, _)| other == name) {
                return refuse(format!("{name} twice"), "give each axis a name of its own");
            }
        }
        let product = axes.iter().try_fold(1usize, |product, (_, size)| product.checked_mul(*size));
        if product != Some(comm.world_size()) {
            let help = format!("their product must be the world size, {}", comm.world_size());
            return refuse(format!("{axes:?}"), &help);
        }
        let rank = comm.rank();
        let mut stride = comm.world_size();
        let mut made = Vec::with_capacity(axes.len());
        for (name, size) in axes {
            stride /= size;
            let coordinate = rank / stride % size;
            // Ranks of one color differ in this coordinate only.
            let color = rank - coordinate * stride;
            let Some(group) = comm.split(Some(color), coordinate)? else { continue };
            made.push(Axis { name: (*name).into(), comm: group });
        }
        Ok(Self { world: comm, axes: made })
    }

    /// The group along an axis: this rank's coordinate is its rank in it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a name that no axis has.
    pub fn axis(&self, name: &str) -> Result<&Arc<dyn Communicator>> {
        let axis = self.axes.iter().find(|axis| axis.name == name);
        axis.map(|axis| &axis.comm).ok_or_else(|| {
            let names: Vec<_> = self.axes.iter().map(|axis| axis.name.as_str()).collect();
            Error::invalid("the axis of a mesh", name, format!("give one of {}", names.join(", ")))
        })
    }

    /// Where this rank is, by axis.
    pub fn coordinates(&self) -> Vec<usize> {
        self.axes.iter().map(|axis| axis.comm.rank()).collect()
    }

    /// Names and sizes, as they were given.
    pub fn axes(&self) -> impl Iterator<Item = (&str, usize)> {
        self.axes.iter().map(|axis| (axis.name.as_str(), axis.comm.world_size()))
    }

    /// The group of all ranks.
    pub fn world(&self) -> &Arc<dyn Communicator> {
        &self.world
    }
}
