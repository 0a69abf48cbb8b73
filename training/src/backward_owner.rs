//! Which model's backward pass runs on this thread: for operations that give their gradients to a model instead of to candle.

use ops::kernels::scoped;
use std::any::TypeId;
use std::cell::RefCell;

thread_local! {
    /// Type and address of the model whose backward runs.
    static OWNER: RefCell<Option<(TypeId, usize)>> = const { RefCell::new(None) };
}

/// Whose backward pass runs on this thread, as one model sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackwardOwner {
    /// No model's of this type: candle's own, or none.
    Nobody,
    /// Another model's of the same type.
    Another,
    /// This model's.
    This,
}

/// Runs a backward pass as that of `model`, so that [`backward_owner`] recognizes it. If it panics, `panicked` is called.
///
/// ```
/// use training::internal::{BackwardOwner, backward_of, backward_owner};
///
/// struct Model(u8);
/// let (model, other) = (Model(1), Model(2));
/// let seen = backward_of(&model, || [backward_owner(&model), backward_owner(&other)], || {});
/// assert_eq!(seen, [BackwardOwner::This, BackwardOwner::Another]);
/// assert_eq!(backward_owner(&model), BackwardOwner::Nobody);
/// ```
pub fn backward_of<M: 'static, R>(model: &M, backward: impl FnOnce() -> R, panicked: impl FnOnce()) -> R {
    struct Panicked<F: FnOnce()>(Option<F>);
    impl<F: FnOnce()> Drop for Panicked<F> {
        fn drop(&mut self) {
            if let (true, Some(panicked)) = (std::thread::panicking(), self.0.take()) {
                panicked();
            }
        }
    }
    let _panicked = Panicked(Some(panicked));
    scoped(&OWNER, Some(key(model)), backward)
}

/// Returns whose backward pass runs on this thread, as `model` sees it.
pub fn backward_owner<M: 'static>(model: &M) -> BackwardOwner {
    match OWNER.with_borrow(|owner| *owner) {
        Some(owner) if owner == key(model) => BackwardOwner::This,
        Some((of, _)) if of == TypeId::of::<M>() => BackwardOwner::Another,
        _ => BackwardOwner::Nobody,
    }
}

fn key<M: 'static>(model: &M) -> (TypeId, usize) {
    (TypeId::of::<M>(), std::ptr::from_ref(model).addr())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_of_other_types_are_nobody_and_the_owner_before_comes_back() {
        let (model, other) = (1u8, 2u16);
        backward_of(
            &model,
            || {
                assert_eq!(backward_owner(&other), BackwardOwner::Nobody);
                backward_of(&other, || assert_eq!(backward_owner(&model), BackwardOwner::Nobody), || {});
                assert_eq!(backward_owner(&model), BackwardOwner::This);
            },
            || {},
        );
    }

    #[test]
    fn a_panic_is_told() {
        let mut told = false;
        let backward = || backward_of(&0u8, || panic!("here"), || told = true);
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(backward)).is_err());
        assert!(told);
        assert_eq!(backward_owner(&0u8), BackwardOwner::Nobody);
    }
}
