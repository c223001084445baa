"""Fast answers of one model to many short questions: prompts, label words and scores."""

from ssmscope.evaluation.evaluator import Evaluator as Evaluator
from ssmscope.evaluation.verbalizer import LabelWords as LabelWords
from ssmscope.evaluation.verbalizer import Template as Template
from ssmscope.evaluation.verbalizer import label_words as label_words
