"""Which of captum's attributions there are; apart, so that nothing heavy is imported for a list of names."""

CAPTUM = (
    "DeepLift",
    "FeatureAblation",
    "GradientShap",
    "InputXGradient",
    "IntegratedGradients",
    "KernelShap",
    "Lime",
    "NoiseTunnel",
    "Occlusion",
    "Saliency",
    "ShapleyValueSampling",
    "ShapleyValues",
)
"""captum's attributions of inputs that can be asked of any function."""
