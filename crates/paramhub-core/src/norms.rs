//! The norm of a step's whole mean gradient, from the parts that the routes send.

use thiserror::Error;

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
        let norm_parts = || NormParts { parts: vec![0.0; routes], missing: routes };
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

    /// Takes the part that the route at this position sends for a step, and returns the norm with the last
    /// part. Parts are added in route order, whatever the order in which they come.
    pub fn part(
        &mut self,
        route: usize,
        step: u32,
        squares: f64,
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
        norm_parts.missing -= 1;
        if norm_parts.missing > 0 {
            return Ok(None);
        }
        norm_parts.missing = norm_parts.parts.len();
        let norm = norm_parts.parts.iter().sum::<f64>().sqrt();
        self.oldest = Some(oldest + 1);
        Ok(Some(GradientNorm { step, norm }))
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

    #[test]
    fn parts_are_added_in_route_order_whenever_they_come() {
        let parts = [1e16_f64, 1.0, 1.0];
        let norm = (parts[0] + parts[1] + parts[2]).sqrt();
        for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
            let mut norms = Norms::new(3);
            for step in 7..11 {
                for route in order {
                    let complete = norms.part(route, step, parts[route]).unwrap();
                    assert_eq!(complete.is_some(), route == order[2]);
                    assert!(complete.is_none_or(|complete| complete == GradientNorm { step, norm }));
                }
            }
        }
    }

    #[test]
    fn a_route_may_be_one_step_ahead_and_no_more() {
        let mut norms = Norms::new(2);
        assert_eq!(norms.part(0, 3, 9.0), Ok(None));
        assert_eq!(norms.part(0, 3, 9.0), Err(UnexpectedNorm(3)), "twice");
        assert_eq!(norms.part(1, 4, 9.0), Err(UnexpectedNorm(4)), "one was left out");
        assert_eq!(norms.part(0, 4, 1.0), Ok(None));
        assert_eq!(norms.part(0, 5, 1.0), Err(UnexpectedNorm(5)), "two steps ahead");
        assert_eq!(norms.part(1, 3, 16.0), Ok(Some(GradientNorm { step: 3, norm: 5.0 })));
        assert_eq!(norms.part(0, 5, 4.0), Ok(None));
        assert_eq!(norms.part(1, 4, 0.0), Ok(Some(GradientNorm { step: 4, norm: 1.0 })));
        assert_eq!(norms.part(1, 5, f64::INFINITY).unwrap().unwrap().norm, f64::INFINITY);
    }

    #[test]
    fn a_route_whose_stream_was_replaced_may_repeat_its_last_part() {
        let mut norms = Norms::new(2);
        norms.resume(0);
        assert_eq!(norms.part(0, 3, 9.0), Ok(None), "the first part was lost");
        assert_eq!(norms.part(0, 3, 9.0), Err(UnexpectedNorm(3)), "twice on one stream");
        norms.resume(0);
        assert_eq!(norms.part(0, 3, 9.0), Ok(None), "repeated");
        assert_eq!(norms.part(0, 3, 9.0), Err(UnexpectedNorm(3)));
        norms.resume(0);
        norms.resume(1);
        assert_eq!(norms.part(1, 3, 16.0), Ok(Some(GradientNorm { step: 3, norm: 5.0 })));
        assert_eq!(norms.part(0, 4, 1.0), Ok(None), "the last part of the former stream had come");
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
