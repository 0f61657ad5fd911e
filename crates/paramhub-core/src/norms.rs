//! The norm of a step's whole mean gradient, and those of whole tensors, from the parts that the routes send.

use thiserror::Error;

/// The sums of squares by which an optimizer that scales its updates by the norms of whole tensors does so (LARS, LAMB).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TensorSquares {
    /// Of the tensor's parameters.
    pub parameters: f64,
    /// Of its mean gradient or of the update, as the optimizer defines it.
    pub update: f64,
}

impl std::ops::AddAssign for TensorSquares {
    fn add_assign(&mut self, other: Self) {
        self.parameters += other.parameters;
        self.update += other.update;
    }
}

/// The parts of the norms that one worker is collecting. These are of two steps at most: a route is released
/// for the next step only when every route has sent its part of this one, and each route sends its part
/// before its answer.
#[derive(Clone, Debug)]
pub struct Norms {
    /// The parts of step `s`, at `s % 2`.
    parts_by_step: [NormParts; 2],
    /// The step of each route's next part.
    next: Vec<u32>,
    /// The oldest incomplete step; none before the first part.
    oldest: Option<u32>,
    /// For each route, whether its next part may be one that is here already.
    may_repeat: Vec<bool>,
}

#[derive(Clone, Debug)]
struct NormParts {
    /// The sums of squares, by route.
    parts: Vec<f64>,
    /// Those of each tensor, by route; empty where the optimizer needs none.
    tensors: Vec<Vec<TensorSquares>>,
    missing: usize,
}

/// The norm of a step whose parts are all here.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradientNorm {
    /// The step.
    pub step: u32,
    /// The Euclidean norm of its whole mean gradient.
    pub norm: f64,
}

/// A part that was not expected: the hub is at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the hub sent its part of the norm of step {0}, for which nothing waits")]
pub struct UnexpectedNorm(pub u32);

impl Norms {
    /// Norms in parts from this many routes.
    pub fn new(routes: usize) -> Self {
        let norm_parts =
            || NormParts { parts: vec![0.0; routes], tensors: vec![Vec::new(); routes], missing: routes };
        Norms {
            parts_by_step: [norm_parts(), norm_parts()],
            next: vec![0; routes],
            oldest: None,
            may_repeat: vec![false; routes],
        }
    }

    /// Notes that another stream has replaced that of a route. The hub sends its last part once more, which may be here.
    pub fn resume(&mut self, route: usize) {
        self.may_repeat[route] = true;
    }

    /// Takes the part that the route at this position sends for a step, with those of its tensors if there are any, and returns
    /// the norm with the last part. Parts are added in route order, whatever the order in which they come.
    pub fn part(
        &mut self,
        route: usize,
        step: u32,
        squares: f64,
        tensors: impl Iterator<Item = TensorSquares>,
    ) -> Result<Option<GradientNorm>, UnexpectedNorm> {
        let oldest = *self.oldest.get_or_insert_with(|| {
            self.next.fill(step);
            step
        });
        if std::mem::take(&mut self.may_repeat[route]) && step.checked_add(1) == Some(self.next[route]) {
            return Ok(None);
        }
        if step != self.next[route] || step - oldest > 1 || step == u32::MAX {
            return Err(UnexpectedNorm(step));
        }
        self.next[route] = step + 1;
        let norm_parts = &mut self.parts_by_step[step as usize % 2];
        norm_parts.parts[route] = squares;
        norm_parts.tensors[route].clear();
        norm_parts.tensors[route].extend(tensors);
        norm_parts.missing -= 1;
        if norm_parts.missing > 0 {
            return Ok(None);
        }
        norm_parts.missing = norm_parts.parts.len();
        let norm = norm_parts.parts.iter().sum::<f64>().sqrt();
        self.oldest = Some(oldest + 1);
        Ok(Some(GradientNorm { step, norm }))
    }

    /// The sums of squares of whole tensors at a step whose parts are all here and whose next step's are not. They are none if no
    /// route has sent any.
    pub fn tensors(&self, step: u32) -> Vec<TensorSquares> {
        let parts = &self.parts_by_step[step as usize % 2].tensors;
        let mut total = vec![TensorSquares::default(); parts.iter().map(Vec::len).max().unwrap_or(0)];
        for part in parts {
            total.iter_mut().zip(part).for_each(|(total, part)| *total += *part);
        }
        total
    }
}

/// The factor that clips a gradient of this `norm` to `clip_norm`, as torch.nn.utils.clip_grad_norm_ defines
/// it: `min(1, clip_norm / (norm + 1e-6))`. An infinite norm makes it 0 and NaN makes it NaN, as in torch
/// without `error_if_nonfinite`.
pub fn clip_factor(clip_norm: f64, norm: f64) -> f32 {
    let factor = (clip_norm / (norm + 1e-6)) as f32;
    // This does not use `min`, which would turn NaN into 1.
    if factor > 1.0 { 1.0 } else { factor }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(
        norms: &mut Norms,
        route: usize,
        step: u32,
        squares: f64,
    ) -> Result<Option<GradientNorm>, UnexpectedNorm> {
        norms.part(route, step, squares, std::iter::empty())
    }

    #[test]
    fn tensors_are_added_up_over_the_routes_that_have_their_chunks() {
        let squares = |parameters| TensorSquares { parameters, update: 10.0 * parameters };
        let mut norms = Norms::new(2);
        for step in 4..7 {
            assert_eq!(norms.part(1, step, 1.0, [squares(2.0), squares(3.0)].into_iter()), Ok(None));
            let own = [squares(1.0), TensorSquares::default()];
            assert!(norms.part(0, step, 1.0, own.into_iter()).unwrap().is_some());
            assert_eq!(norms.tensors(step), [squares(3.0), squares(3.0)]);
        }
        let mut norms = Norms::new(1);
        part(&mut norms, 0, 0, 4.0).unwrap().unwrap();
        assert!(norms.tensors(0).is_empty());
    }

    #[test]
    fn parts_are_added_in_route_order_whenever_they_come() {
        let parts = [1e16_f64, 1.0, 1.0];
        let norm = (parts[0] + parts[1] + parts[2]).sqrt();
        for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
            let mut norms = Norms::new(3);
            for step in 7..11 {
                for route in order {
                    let complete = part(&mut norms, route, step, parts[route]).unwrap();
                    assert_eq!(complete.is_some(), route == order[2]);
                    assert!(complete.is_none_or(|complete| complete == GradientNorm { step, norm }));
                }
            }
        }
    }

    #[test]
    fn a_route_may_be_one_step_ahead_and_no_more() {
        let mut norms = Norms::new(2);
        assert_eq!(part(&mut norms, 0, 3, 9.0), Ok(None));
        assert_eq!(part(&mut norms, 0, 3, 9.0), Err(UnexpectedNorm(3)), "twice");
        assert_eq!(part(&mut norms, 1, 4, 9.0), Err(UnexpectedNorm(4)), "one was left out");
        assert_eq!(part(&mut norms, 0, 4, 1.0), Ok(None));
        assert_eq!(part(&mut norms, 0, 5, 1.0), Err(UnexpectedNorm(5)), "two steps ahead");
        assert_eq!(part(&mut norms, 1, 3, 16.0), Ok(Some(GradientNorm { step: 3, norm: 5.0 })));
        assert_eq!(part(&mut norms, 0, 5, 4.0), Ok(None));
        assert_eq!(part(&mut norms, 1, 4, 0.0), Ok(Some(GradientNorm { step: 4, norm: 1.0 })));
        assert_eq!(part(&mut norms, 1, 5, f64::INFINITY).unwrap().unwrap().norm, f64::INFINITY);
    }

    #[test]
    fn a_route_whose_stream_was_replaced_may_repeat_its_last_part() {
        let mut norms = Norms::new(2);
        norms.resume(0);
        assert_eq!(part(&mut norms, 0, 3, 9.0), Ok(None), "the first part was lost");
        assert_eq!(part(&mut norms, 0, 3, 9.0), Err(UnexpectedNorm(3)), "twice on one stream");
        norms.resume(0);
        assert_eq!(part(&mut norms, 0, 3, 9.0), Ok(None), "repeated");
        assert_eq!(part(&mut norms, 0, 3, 9.0), Err(UnexpectedNorm(3)));
        norms.resume(0);
        norms.resume(1);
        assert_eq!(part(&mut norms, 1, 3, 16.0), Ok(Some(GradientNorm { step: 3, norm: 5.0 })));
        assert_eq!(part(&mut norms, 0, 4, 1.0), Ok(None), "the last part of the former stream had come");
    }

    #[test]
    fn a_gradient_is_clipped_as_torch_does() {
        assert_eq!(clip_factor(1.0, 0.5), 1.0);
        assert_eq!(clip_factor(1.0, 0.0), 1.0);
        assert_eq!(clip_factor(1.0, 4.0), (1.0 / 4.000_001) as f32);
        assert_eq!(clip_factor(2.0, 2.0), (2.0 / 2.000_001) as f32, "just below 1");
        assert_eq!(clip_factor(1.0, f64::INFINITY), 0.0);
        assert!(clip_factor(1.0, f64::NAN).is_nan());
    }
}
