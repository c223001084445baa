"""Names of captum's attributions, in a module without heavy imports."""

CAPTUM = (
    *("DeepLift", "FeatureAblation", "GradientShap", "InputXGradient", "IntegratedGradients", "KernelShap", "Lime"),
    *("NoiseTunnel", "Occlusion", "Saliency", "ShapleyValueSampling", "ShapleyValues"),
)
"""captum's attributions of inputs that work for any function."""
